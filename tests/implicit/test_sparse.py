"""Tests of the linear solver "sparse": large problems against derivatives by hand, and messages on singular systems."""

import numpy as np
import pytest
import torch
from scipy.linalg import solve_banded

import hodiff
from hodiff.implicit import argmin, equality_argmin, fixed_point, linear_solve, newton, picard, root, stationary

D = torch.float64
N = 2000
P = torch.tensor(1.5, dtype=D)


def bratu(u, p):
    """Compute the residual of -u'' = p exp(u) on the unit interval, zero at both ends, times h²."""
    padded = torch.nn.functional.pad(u, (1, 1))
    return 2 * u - padded[2:] - padded[:-2] - p * (u.exp() / (len(u) + 1) ** 2)


def energy(u, p):
    """Compute an energy whose gradient is `bratu`."""
    return torch.nn.functional.pad(u, (1, 1)).diff().square().sum() / 2 - p * u.exp().sum() / (len(u) + 1) ** 2


def by_hand(u, p):
    """Compute first and second derivatives of u by p: J u' = h² exp(u), and J u'' = h² exp(u) (2 u' + p u'²)."""
    load = np.exp(u) / (len(u) + 1) ** 2
    bands = np.full((3, len(u)), -1.0)
    bands[1] = 2 - p * load
    first = solve_banded((1, 1), bands, load)
    return first, solve_banded((1, 1), bands, load * (2 * first + p * first**2))


MAKERS = {
    "root": lambda: root(bratu, newton(linear_solver="sparse"), linear_solver="sparse"),
    "argmin": lambda: argmin(energy, stationary(newton(linear_solver="sparse")), linear_solver="sparse"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_two_thousand_unknowns_match_derivatives_by_hand(name):
    solution = MAKERS[name]()
    start = torch.zeros(N, dtype=D)
    u = solution(start, P)
    first, second = by_hand(u.numpy(), float(P))

    def total(p):
        return solution(start, p).sum()

    np.testing.assert_allclose(torch.func.jacfwd(lambda p: solution(start, p))(P).numpy(), first, rtol=1e-9)
    assert torch.func.grad(total)(P).item() == pytest.approx(first.sum(), rel=1e-9)
    for route in hodiff.ROUTES:
        found = hodiff.hvp(total, P, torch.ones_like(P), route=route)
        assert found.item() == pytest.approx(second.sum(), rel=1e-8)


def test_number_of_products_does_not_grow_with_unknowns():
    """The number of products does not grow with the unknowns, and the sparsity pattern is cached."""
    calls = []

    def residual(u, p):
        calls.append(None)
        return bratu(u, p)

    solution = root(residual, lambda f, u, p: known, linear_solver="sparse")
    known = MAKERS["root"]()(torch.zeros(N, dtype=D), P)
    counts = []
    for _ in range(2):
        calls.clear()
        p = P.clone().requires_grad_()
        torch.autograd.grad(solution(torch.zeros(N, dtype=D), p).sum(), p)
        counts.append(len(calls))
    assert counts[1] < counts[0] < 20


def test_pytrees_with_several_dtypes_are_accepted():
    """The solver supports x = (a, b) with a scalar b and a different dtype for each."""

    def residual(x, p):
        return {"a": x["a"] ** 3 - p, "b": x["b"] - x["a"].sum().float()}

    start = {"a": torch.ones(3, dtype=D), "b": torch.ones(())}
    solution = root(residual, newton(linear_solver="sparse"), linear_solver="sparse")
    p = torch.tensor([1.0, 2.0, 3.0], dtype=D)
    torch.testing.assert_close(solution(start, p)["b"], p.pow(1 / 3).sum().float())
    slope = torch.func.grad(lambda p: solution(start, p)["b"])(p)
    torch.testing.assert_close(slope, p ** (-2 / 3) / 3, rtol=1e-6, atol=0)


def test_multipliers_match_the_dense_solver():
    """Derivatives of the Karush-Kuhn-Tucker conditions match the dense solver and the closed form."""
    q, s = torch.linspace(1, 2, 8, dtype=D), torch.tensor(0.7, dtype=D)

    def slopes(linear_solver):
        f = equality_argmin(
            lambda x, q, s: (q * x * x).sum() / 2, lambda x, q, s: x[::2].sum() - s, linear_solver=linear_solver
        )
        return torch.func.jacrev(lambda q: torch.cat([each.reshape(-1) for each in f(torch.zeros_like(q), q, s)]))(q)

    even = (1 / q)[::2].sum()
    found = slopes("sparse")
    x = torch.where(torch.arange(8) % 2 == 0, s / q / even, 0.0)
    expected = torch.diag(-x / q) + x[:, None] * (x / q / s)
    torch.testing.assert_close(found[:8], expected)
    torch.testing.assert_close(found, slopes("dense"))


def test_vmap_and_float32_match():
    solution = root(bratu, newton(linear_solver="sparse"), linear_solver="sparse")
    ps = torch.tensor([0.5, 1.0], dtype=D)
    start = torch.zeros(20, dtype=D)
    batched = torch.func.vmap(torch.func.jacfwd(lambda p: solution(start, p)))(ps)
    for p, found in zip(ps, batched, strict=True):
        np.testing.assert_allclose(found.numpy(), by_hand(solution(start, p).numpy(), float(p))[0], rtol=1e-9)
    single = torch.func.jacfwd(lambda p: solution(start.float(), p))(ps[0].float())
    assert single.dtype is torch.float32
    torch.testing.assert_close(single.double(), batched[0], rtol=1e-3, atol=0)


def test_fixed_points_and_linear_solves_match():
    S, b = torch.diag(torch.linspace(0.1, 0.5, 9, dtype=D)), torch.linspace(1, 2, 9, dtype=D)
    f = fixed_point(lambda x, S, b: S.diagonal() * x + b, picard(), linear_solver="sparse")
    torch.testing.assert_close(
        torch.func.jacrev(lambda b: f(torch.zeros_like(b), S, b))(b), torch.diag(1 / (1 - S.diag()))
    )
    shift = lambda x, p: p * x + torch.nn.functional.pad(x[:-1], (1, 0))  # noqa: E731
    p = torch.tensor(2.0, dtype=D)
    matrix = p * torch.eye(9, dtype=D) + torch.diag(torch.ones(8, dtype=D), -1)
    x = torch.linalg.solve(matrix, b)
    torch.testing.assert_close(linear_solve(shift, b, p, method="sparse"), x)
    slope = torch.func.jacrev(lambda p: linear_solve(shift, b, p, method="sparse"))(p)
    torch.testing.assert_close(slope, -torch.linalg.solve(matrix, x))


def test_asymmetric_jacobian_matches_in_both_modes():
    """Forward mode and (with the transpose) reverse mode are correct for x + x³ plus the preceding unknown."""
    below = lambda x: torch.nn.functional.pad(x[:-1], (1, 0))  # noqa: E731
    solution = root(lambda x, p: x + x**3 + below(x) - p, newton(linear_solver="sparse"), linear_solver="sparse")
    f = lambda p: solution(torch.zeros_like(p), p)  # noqa: E731
    p = torch.linspace(-1, 3, 9, dtype=D)
    expected = torch.linalg.inv(torch.diag(1 + 3 * f(p) ** 2) + torch.diag(torch.ones(8, dtype=D), -1))
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(transform(f)(p), expected)


@pytest.mark.parametrize("apart", [0.0, 1e-15])
def test_singular_jacobian_raises(apart):
    """A Jacobian that is singular exactly, or up to rounding, raises."""

    def residual(x, p):
        return torch.stack([x.sum() - p, 3 * x.sum() - 3 * p + apart * (x[0] - p / 2)])

    f = root(residual, lambda residual, x0, p: p * X / 2, linear_solver="sparse", throw=True)
    words = "the Jacobian is singular" if not apart else "the Jacobian (is|may be) singular"
    with pytest.raises(hodiff.ConvergenceError, match=f"root: .*{words}"):
        torch.func.jacrev(lambda p: f(X, p))(P)


X = torch.ones(2, dtype=D)


def test_different_units_do_not_make_a_jacobian_singular():
    scales = torch.logspace(-30, 30, 7, dtype=D)
    f = root(lambda x, p: scales * (x - p), lambda residual, x0, p: p.clone(), linear_solver="sparse", throw=True)
    p = torch.ones(7, dtype=D)
    torch.testing.assert_close(torch.func.jacrev(lambda p: f(torch.zeros(7, dtype=D), p))(p), torch.eye(7, dtype=D))


def test_branches_on_values_use_the_pattern_at_the_solution():
    f = root(lambda x, p: x - p if x[0] > 0 else x - 2 * p, lambda residual, x0, p: p.clone(), linear_solver="sparse")
    with pytest.warns(hodiff.HodiffWarning, match="The pattern at this x is used, checked by a product"):
        found = torch.func.jacrev(lambda p: f(X, p))(X)
    torch.testing.assert_close(found, torch.eye(len(X), dtype=X.dtype))
