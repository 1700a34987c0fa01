"""Tests of soft ranks and sorting: optimality, limits of the temperature, ties, and SciPy's isotonic regression."""

import itertools

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

import hodiff
from hodiff.errors import InputError
from hodiff.functions.projections.sorting import isotonic_blocks, soft_rank, soft_sort

X = torch.tensor([0.5, 3.0, 1.0, 0.8], dtype=torch.float64)
VECTORS = arrays.arrays("float64", 4, elements=st.floats(-20, 20))


def assert_nearest(projected, z, w):
    """Check that the projection is nearest in the hull: <z - projected, vertex - projected> is not positive."""
    scale = 1 + float(z.abs().max()) * float(w.abs().max() + 1)
    assert float(projected.sum()) == pytest.approx(float(w.sum()), abs=1e-10 * scale)
    for vertex in itertools.permutations(w.tolist()):
        assert float((z - projected) @ (torch.tensor(vertex, dtype=torch.float64) - projected)) <= 1e-9 * scale


@given(VECTORS, st.floats(0.1, 10))
def test_soft_rank_is_nearest_point(values, temperature):
    x, ranks = torch.from_numpy(values), torch.arange(1.0, 5, dtype=torch.float64)
    assert_nearest(soft_rank(x, temperature), x / temperature, ranks)
    assert_nearest(soft_rank(x, temperature, descending=True), -x / temperature, ranks)


@given(VECTORS, st.floats(0.1, 10))
def test_soft_sort_is_nearest_point(values, temperature):
    x, ranks = torch.from_numpy(values), torch.arange(4.0, 0, -1, dtype=torch.float64)
    assert_nearest(soft_sort(x, temperature, descending=True), ranks / temperature, x)
    assert_nearest(-soft_sort(x, temperature), ranks / temperature, -x)


@given(arrays.arrays("float64", 40, elements=st.integers(-30, 30).map(float)))
def test_isotonic_blocks_match_scipy(values):
    y = torch.from_numpy(values)
    blocks = isotonic_blocks(y)
    means = torch.zeros(40, dtype=torch.float64).scatter_reduce(0, blocks, y, "mean", include_self=False)[blocks]
    np.testing.assert_allclose(means, isotonic_regression(values, increasing=False).x, atol=1e-12)


def test_isotonic_blocks_of_many_rows_match_single_rows():
    y = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(isotonic_blocks(y), torch.stack([isotonic_blocks(row) for row in y]))


def test_low_temperature_limit_is_exact():
    assert soft_rank(X, 1e-9).tolist() == [1, 4, 3, 2]
    assert soft_rank(X, 1e-9, descending=True).tolist() == [4, 1, 2, 3]
    assert torch.equal(soft_sort(X, 1e-9), X.sort().values)
    assert torch.equal(soft_sort(X, 1e-9, descending=True), X.sort(descending=True).values)


def test_high_temperature_limit_is_the_mean():
    torch.testing.assert_close(soft_rank(X, 1e9), torch.full_like(X, 2.5))
    torch.testing.assert_close(soft_sort(X, 1e9), X.mean().expand(4))


def test_equal_numbers_share_a_rank():
    x = torch.tensor([1.0, 2.0, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(soft_rank(x, 0.1), torch.tensor([1.5, 3.5, 1.5, 3.5], dtype=torch.float64))
    jacobian = torch.func.jacrev(lambda x: soft_rank(x, 0.5))(x)
    torch.testing.assert_close(jacobian, jacobian.T)


def test_jacobian_averages_over_blocks():
    """Soft ranks of 1.0 and 0.8 are pooled at this temperature, and the other entries are not."""
    jacobian = torch.func.jacfwd(lambda x: soft_rank(x, 0.25))(X)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[2:, 2:] = (torch.eye(2, dtype=torch.float64) - 0.5) / 0.25
    torch.testing.assert_close(jacobian, expected)
    jacobian = torch.func.jacfwd(lambda x: soft_sort(x, 1.0))(X)
    pooled = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0]], dtype=torch.float64)
    torch.testing.assert_close(jacobian, pooled)


def test_second_derivative_by_the_temperature_matches_closed_form():
    """A pooled rank is affine in 1 / ε, so its second derivative is -2 / ε times its first."""
    temperature = torch.tensor(0.25, dtype=torch.float64)
    _, first, second = hodiff.directional_derivatives(
        lambda t: soft_rank(X, t), temperature, torch.ones_like(temperature), order=2
    )
    torch.testing.assert_close(first, torch.tensor([0, 0, -0.1, 0.1], dtype=torch.float64) / temperature**2)
    torch.testing.assert_close(second, -2 * first / temperature)


def test_gradient_descent_on_soft_ranks_sorts():
    """Gradient descent on the difference of soft ranks sorts one vector like another."""
    target = torch.tensor([2.0, 4.0, 1.0, 3.0], dtype=torch.float64)
    x = X.clone()
    for _ in range(100):
        x = x - 0.02 * torch.func.grad(lambda x: (soft_rank(x, 1.0) - target).square().sum())(x)
    assert x.argsort().tolist() == target.argsort().tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [soft_rank, soft_sort])
def test_compiled_training_step_matches(function):
    x, temperature = X.clone().requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, 5, dtype=torch.float64)
    compiled = torch.compile(lambda x, t: (weights * function(x, t)).sum(), fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, temperature), [x, temperature])
    expected = torch.autograd.grad((weights * function(x, temperature)).sum(), [x, temperature])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [soft_rank, soft_sort])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.long(),), "x: .*int64"),
        ((X[0],), r"x: .*x.unsqueeze\(0\) adds one"),
        ((X, 0.0), "temperature: expected a positive number, got 0.0"),
        ((X, torch.ones(1)), r"temperature: .*shape \(1,\)"),
        ((X, 1.0, 1), "dim: expected ints from -1 to 0"),
        ((X[None], 1.0, (0, 1)), "dim: expected one dimension"),
    ],
)
def test_rejects_bad_arguments(function, arguments, message):
    with pytest.raises(InputError, match=f"{function.__name__}: {message}"):
        function(*arguments)
