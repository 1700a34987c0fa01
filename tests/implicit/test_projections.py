"""Tests of the projection on a box and a hyperplane, against SciPy, closed forms and differences, and under vmap."""

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from slow_cases import slow_except
from torch import Tensor

import hodiff
from hodiff.functions import project_simplex
from hodiff.implicit import project_box_plane

INFINITY = float("inf")


def problem(seed: int, size: int = 7) -> tuple[Tensor, ...]:
    """Draw a point, a normal (some with labels or zeros), an attainable level, and a box (some unbounded)."""
    generator = torch.Generator().manual_seed(seed)
    x, normal = torch.randn(2, size, generator=generator, dtype=torch.float64)
    lower, upper, where = torch.rand(3, size, generator=generator, dtype=torch.float64)
    lower = -lower
    if seed % 3 == 0:
        normal = normal.sign()
    if seed % 4 == 0:
        normal[2:4] = 0
    if seed % 5 == 0:
        lower[1], upper[5] = -INFINITY, INFINITY
    inner = torch.where(lower.isfinite() & upper.isfinite(), lower + (upper - lower) * where, where)
    return 2 * x, normal, (normal @ inner)[None], lower, upper


def by_scipy(x: Tensor, normal: Tensor, level: Tensor, lower: Tensor, upper: Tensor) -> np.ndarray:
    x, normal = x.numpy(), normal.numpy()
    plane = {"type": "eq", "fun": lambda y: y @ normal - level.item(), "jac": lambda y: normal}
    with warnings.catch_warnings():
        # SciPy 1.15 warns when a step leaves the box before clipping.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = minimize(
            lambda y: (((y - x) ** 2).sum() / 2, y - x),
            np.clip(x, lower.numpy(), upper.numpy()),
            jac=True,
            method="SLSQP",
            bounds=list(zip(lower.tolist(), upper.tolist(), strict=True)),
            constraints=plane,
            options={"ftol": 1e-16, "maxiter": 500},
        )
    return found.x


@pytest.mark.parametrize("seed", range(40))
def test_projection_matches_quadratic_program_of_scipy(seed: int) -> None:
    given = problem(seed)
    y = project_box_plane(*given)
    _, normal, level, lower, upper = given
    np.testing.assert_allclose(y.numpy(), by_scipy(*given), atol=1e-7)
    assert (normal @ y).item() == pytest.approx(level.item(), abs=1e-14)
    assert ((lower <= y) & (y <= upper)).all()


@pytest.mark.parametrize("seed", slow_except((1, 3, 4), ()))
def test_third_derivatives_match_differences(seed: int) -> None:
    """Derivatives in all five arguments match differences; the active set is constant around the point."""
    x, normal, level, lower, upper = problem(seed, 5)
    hodiff.check(project_box_plane, (x, normal, level, lower, upper), order=3).raise_on_failure()


@pytest.mark.slow
def test_derivatives_in_a_half_open_box_match_differences() -> None:
    """The bounds are constants here, since differences cannot move an infinite bound."""
    x, normal, level, lower, upper = problem(10, 6)
    assert upper[5] == INFINITY

    def f(x: Tensor, normal: Tensor, level: Tensor) -> Tensor:
        return project_box_plane(x, normal, level, lower, upper)

    hodiff.check(f, (x, normal, level), order=3, vmap=False).raise_on_failure()


def test_first_and_second_derivatives_match_closed_form() -> None:
    """The solution with two free entries and one at its bound is y = x - n (n·(x, u) - c) / (n1² + n2²)."""
    x = torch.tensor([0.3, 0.4, 3.0], dtype=torch.float64)
    n = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    J = torch.func.jacrev(project_box_plane)(x, n, 0.2)
    unit = n[:2] / n[:2].norm()
    np.testing.assert_allclose(J[:2, :2], torch.eye(2, dtype=torch.float64) - unit[:, None] * unit, atol=1e-15)
    assert (J[2] == 0).all()
    assert (J[:, 2] == 0).all()
    by_level = torch.func.jacfwd(project_box_plane, argnums=2)(x, n, torch.tensor(0.2, dtype=torch.float64))
    np.testing.assert_allclose(by_level, torch.cat([n[:2] / 5, torch.zeros(1)]), atol=1e-15)
    # Second derivatives of y1 = x1 - n1 s / |n|² with s = n·(x, u) - c. y1 is linear in n3.
    H = torch.func.hessian(lambda n: project_box_plane(x, n, 0.2)[0])(n)
    s, q = 0.3 + 0.8 - 1.0 - 0.2, 5.0
    assert H[2, 2].item() == pytest.approx(0, abs=1e-15)
    assert H[0, 2].item() == pytest.approx(-1 / q + 2 / q**2)
    assert H[0, 0].item() == pytest.approx(-(2 * 0.3) / q + (6 * s + 4 * 0.3) / q**2 - 8 * s / q**3)


def test_special_sets_match_other_projections() -> None:
    x = torch.tensor([[0.5, 1.0, -1.0], [3.0, 0.2, 0.1]])
    torch.testing.assert_close(project_box_plane(x, 1.0, 1.0, 0.0, INFINITY), project_simplex(x))
    torch.testing.assert_close(project_box_plane(x.T, 1.0, 1.0, 0.0, INFINITY, dim=0), project_simplex(x).T)
    plane = project_box_plane(x, 1.0, 3.0, -INFINITY, INFINITY)
    torch.testing.assert_close(plane, x - (x.sum(-1, keepdim=True) - 3) / 3)
    # The only feasible point is a corner, so the derivative is zero.
    assert project_box_plane(x[0], 1.0, 3.0).tolist() == [1, 1, 1]
    assert (torch.func.jacrev(project_box_plane)(x[0], 1.0, 3.0) == 0).all()
    assert project_box_plane(x[0], 0.0, 0.0).tolist() == [0.5, 1, 0]


@pytest.mark.parametrize("seed", range(4))
def test_vmap_matches_a_loop(seed: int) -> None:
    parts = [problem(seed * 8 + 60 * k + 1) for k in range(5)]
    batch = [torch.stack(each) for each in zip(*parts, strict=True)]
    expected = torch.stack([project_box_plane(*part) for part in parts])
    torch.testing.assert_close(torch.func.vmap(project_box_plane)(*batch), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(project_box_plane(*batch), expected, rtol=0, atol=1e-14)
    slopes = torch.func.vmap(torch.func.jacrev(project_box_plane))(*batch)
    one_by_one = torch.stack([torch.func.jacfwd(project_box_plane)(*part) for part in parts])
    torch.testing.assert_close(slopes, one_by_one, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 255, 256, 257, 1000])
def test_any_size_in_float32_matches_float64(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, labels = torch.randn(2, size, generator=generator)
    y = project_box_plane(x, labels.sign())
    precise = project_box_plane(x.double(), labels.double().sign())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, precise.float(), rtol=0, atol=1e-6)
    assert abs(labels.sign().double() @ precise).item() < 1e-12


def test_equal_breakpoints_are_handled() -> None:
    y = project_box_plane(torch.full((6,), 0.4), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]))
    assert y.tolist() == pytest.approx([0.4] * 6)
    assert project_box_plane(torch.full((5,), 9.0), 1.0, 2.0).tolist() == pytest.approx([0.4] * 5)


def test_nan_input_gives_nan() -> None:
    assert project_box_plane(torch.tensor([0.5, float("nan"), 0.1]), 1.0, 1.0).isnan().any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5], 1.0), r"x: expected a floating-point tensor, got list"),
        ((torch.tensor(0.5), 1.0), r"x: expected at least one dimension, got a number"),
        ((torch.ones(3), torch.ones(2)), r"normal: expected a number or a shape that broadcasts to \(3,\), got \(2,\)"),
        ((torch.ones(3), 1.0, torch.ones(3)), r"level: expected a number or a shape that broadcasts to \(1,\)"),
        ((torch.ones(3), torch.ones(3, dtype=torch.long)), r"normal: expected a floating-point tensor"),
        ((torch.ones(3), 1.0, 3.1), r"level: expected a value that normal @ y reaches in the box"),
        ((torch.ones(3), 1.0, 1.0, 1.0, 0.0), r"check that lower <= upper"),
        ((torch.ones(3), 1.0, 0.0, 0.0, 1.0, (0, 0)), r"dim: "),
    ],
)
def test_rejects_bad_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(hodiff.InputError, match="project_box_plane: .*" + message):
        project_box_plane(*arguments)


def test_empty_set_in_a_batch_gives_nan() -> None:
    y = torch.func.vmap(lambda level: project_box_plane(torch.ones(2), 1.0, level))(torch.tensor([1.0, 5.0]))
    assert y[0].tolist() == [0.5, 0.5]
    assert y[1].isnan().all()
