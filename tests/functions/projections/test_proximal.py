"""Tests of proximal maps and projections: optimality, published Jacobians, kinks and extreme numbers."""

import hypothesis.extra.numpy as arrays
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hodiff
from hodiff.errors import InputError
from hodiff.functions.projections.proximal import group_soft_threshold, project_l2_ball, project_simplex, soft_threshold

X = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
ZERO = torch.zeros(3, dtype=torch.float64)
VECTORS = arrays.arrays("float64", 5, elements=st.floats(-100, 100))
LEVELS = st.floats(0.01, 50)


@given(VECTORS, LEVELS)
def test_soft_threshold_satisfies_optimality(values, lam):
    """Zero lies in y - x + λ ∂|y|."""
    x = torch.from_numpy(values)
    y = soft_threshold(x, lam)
    moved = x - y
    assert (moved.abs() <= lam * (1 + 1e-12) + 1e-12).all()
    torch.testing.assert_close(moved[y != 0], lam * y[y != 0].sign(), rtol=1e-9, atol=1e-12)


@given(VECTORS, LEVELS)
def test_group_soft_threshold_satisfies_optimality(values, lam):
    """Zero lies in y - x + λ ∂‖y‖."""
    x = torch.from_numpy(values)
    y = group_soft_threshold(x, lam)
    if x.norm() <= lam * (1 - 1e-12):
        assert torch.equal(y, torch.zeros_like(x))
    torch.testing.assert_close((x - y).norm(), torch.minimum(x.norm(), torch.tensor(lam).double()))
    torch.testing.assert_close((x - y) * x.norm(), (x - y).norm() * x, rtol=1e-9, atol=1e-9)


@given(VECTORS, LEVELS)
def test_simplex_projection_is_nearest_point(values, radius):
    """No vertex is closer to x: <x - y, vertex - y> is not positive."""
    x = torch.from_numpy(values)
    y = project_simplex(x, radius)
    assert (y >= 0).all()
    assert float(y.sum()) == pytest.approx(radius, rel=1e-12)
    gap = x - y
    assert float((radius * gap).max() - gap @ y) <= 1e-10 * (1 + float(x.abs().max())) * radius


@given(VECTORS, LEVELS)
def test_ball_projection_is_nearest_point(values, radius):
    x = torch.from_numpy(values)
    y = project_l2_ball(x, radius)
    assert float(y.norm()) <= radius * (1 + 1e-12)
    if x.norm() <= radius:
        assert torch.equal(y, x)
    # y is the farthest point of the ball along x - y.
    gap = x - y
    assert radius * float(gap.norm()) - float(gap @ y) <= 1e-10 * (1 + float(x.norm())) * radius or y.equal(x)


@pytest.mark.parametrize("lam", [0.0, 1.0, torch.tensor(1.0, dtype=torch.float64)])
def test_group_soft_threshold_derivatives_at_zero_are_zero(lam):
    for k in range(3):
        derivatives = hodiff.directional_derivatives(lambda x: group_soft_threshold(x, lam), ZERO, X, order=k + 1)
        for each in derivatives:
            assert torch.equal(each, ZERO)
    for route in hodiff.ROUTES:
        product = hodiff.hvp(lambda x: group_soft_threshold(x, lam).exp().sum(), ZERO, X, route=route)
        assert torch.equal(product, ZERO)


def test_ball_projection_derivative_at_zero_is_identity():
    assert torch.equal(torch.func.jacrev(project_l2_ball)(ZERO), torch.eye(3, dtype=torch.float64))
    for route in hodiff.ROUTES:
        product = hodiff.hvp(lambda x: project_l2_ball(x).square().sum(), ZERO, X, route=route)
        assert torch.equal(product, 2 * X)


@pytest.mark.parametrize("function", [project_l2_ball, group_soft_threshold])
def test_points_on_the_boundary_count_as_inside(function):
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda x: function(x, 5.0))(x)
    inside = torch.eye(2, dtype=torch.float64)
    assert torch.equal(jacobian, inside if function is project_l2_ball else 0 * inside)


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1e150, 1e300])
def test_ball_projection_at_extreme_norms(size):
    direction = X / X.norm()
    y = project_l2_ball(size * X, size)
    torch.testing.assert_close(y / size, direction, rtol=1e-14, atol=0)
    expected = (torch.eye(3, dtype=torch.float64) - torch.outer(direction, direction)) / X.norm()
    torch.testing.assert_close(torch.func.jacrev(lambda x: project_l2_ball(x, size))(size * X), expected)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: project_l2_ball(x, size))(size * X), expected)
    y = group_soft_threshold(size * X, size)
    torch.testing.assert_close(y / size, X - direction, rtol=1e-14, atol=0)


def test_simplex_projection_jacobian_matches_published_formula():
    x = torch.tensor([0.5, 1.0, -1.0, 0.6], dtype=torch.float64)
    s = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    expected = torch.diag(s) - torch.outer(s, s) / 3
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(project_simplex)(x), expected)
    by_radius = torch.func.jacfwd(lambda r: project_simplex(x, r))(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(by_radius, s / 3)


def test_simplex_projection_of_ties_and_masked_entries():
    tied = torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(project_simplex(tied), torch.full_like(tied, 0.25))
    masked = torch.tensor([0.3, float("-inf"), 0.1], dtype=torch.float64)
    torch.testing.assert_close(project_simplex(masked), torch.tensor([0.6, 0.0, 0.4], dtype=torch.float64))
    jacobian = torch.func.jacrev(project_simplex)(masked)
    assert jacobian.isfinite().all()
    # An entry that exactly reaches zero is outside the support.
    corner = torch.func.jacrev(project_simplex)(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert torch.equal(corner, torch.zeros(2, 2, dtype=torch.float64))


def test_simplex_projection_far_from_zero_is_exact():
    x = torch.tensor([1e12 + 0.5, 1e12 + 0.25], dtype=torch.float64)
    assert torch.equal(project_simplex(x), torch.tensor([0.625, 0.375], dtype=torch.float64))


@pytest.mark.parametrize("function", [project_simplex, project_l2_ball, lambda x: group_soft_threshold(x, 1.0)])
def test_nan_input_gives_nan(function):
    assert function(torch.tensor([1.0, float("nan")])).isnan().any()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, level: soft_threshold(x, level),
        lambda x, level: group_soft_threshold(x, level),
        lambda x, level: project_l2_ball(x, level),
        lambda x, level: project_simplex(x, level),
    ],
)
def test_compiled_training_step_matches(function):
    x, level = (3 * X).requires_grad_(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, 4, dtype=torch.float64)
    compiled = torch.compile(lambda x, r: (weights * function(x, r)).sum(), fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, level), [x, level])
    expected = torch.autograd.grad((weights * function(x, level)).sum(), [x, level])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: soft_threshold(X, -1.0), "soft_threshold: lam: expected a nonnegative number, got -1.0"),
        (lambda: soft_threshold(X, torch.ones(2)), "expected shapes that broadcast"),
        (lambda: soft_threshold(X.long(), 1.0), "x: .*int64"),
        (lambda: group_soft_threshold(X, "a"), "lam: .*str"),
        (lambda: group_soft_threshold(X[0], 1.0), r"x.unsqueeze\(0\) adds one"),
        (lambda: project_l2_ball(X, torch.ones(3)), r"radius: expected a shape that broadcasts to \(1,\)"),
        (lambda: project_l2_ball(X, torch.ones(2, 1)), r"got \(2, 1\)"),
        (lambda: project_l2_ball(X, dim=1), "dim: expected ints from -1 to 0"),
        (lambda: project_simplex(X, 0.0), "radius: expected a positive number, got 0.0"),
        (lambda: project_simplex(X[None], dim=(0, 1)), "dim: expected one dimension"),
        (lambda: project_simplex(X[:0]), "not empty"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
