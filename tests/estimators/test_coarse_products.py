"""Operators that compute partly in lower precision than their dtype, as models that normalize in float32 do."""

import pytest
import torch
from torch import nn

import hodiff
from hodiff import estimators
from hodiff.estimators.adapted_operators import view_of

D = torch.float64


class RMSNorm(nn.Module):
    """The normalization of Llama and T5, which computes in `dtype` whatever the input's dtype."""

    def __init__(self, size, dtype):
        super().__init__()
        self.dtype = dtype
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x):
        h = x.to(self.dtype)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


def operator(dtype):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), RMSNorm(8, dtype), nn.Linear(8, 3)).double()
    point = {name: torch.randn(each.shape, dtype=D, generator=generator) for name, each in model.named_parameters()}
    x, y = torch.randn(20, 4, dtype=D, generator=generator), torch.arange(20) % 3

    def loss(point):
        return nn.functional.cross_entropy(torch.func.functional_call(model, point, (x,)), y)

    return hodiff.HessianOperator(loss, point)


@pytest.fixture(scope="module")
def coarse():
    return operator(torch.float32)


@pytest.fixture(scope="module")
def matrix():
    """The reference matrix, computed in float64 throughout."""
    return operator(D).to_dense()


def test_precision_of_coarse_products_is_measured_once(coarse):
    view = view_of(coarse, "test")
    assert view.rounding == torch.finfo(D).eps
    assert not view.precision
    assert view.finds_coarser()
    assert 1e-9 < view.rounding < 1e-6
    assert view.products == 4
    assert "Products come in float64 and are exact to" in view.precision
    assert not view.finds_coarser()
    assert view.products == 4


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_exact_products_are_recognized(matrix, dtype):
    view = view_of(matrix.to(dtype), "test")
    assert not view.finds_coarser()
    assert not view.precision


def test_random_products_have_no_measured_precision(matrix):
    class Random:
        shape, dtype, device = matrix.shape, D, matrix.device

        def __matmul__(self, block):
            return matrix @ block * (1 + 1e-2 * torch.rand(()))

    assert not view_of(Random(), "test").finds_coarser()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg", "dense"])
def test_eigenvalues_of_coarse_products_match(coarse, matrix, method):
    expected = torch.linalg.eigvalsh(matrix)[-3:]
    found = estimators.eigsh(coarse, 3, which="LA", method=method)
    assert found.converged
    torch.testing.assert_close(found.eigenvalues, expected, rtol=1e-6, atol=1e-7)


def test_unreachable_tolerance_raises_with_the_precision(coarse):
    with pytest.raises(hodiff.ConvergenceError, match=r"exact to \d\.?\d*e-\d+ only.*convert that part to float64"):
        estimators.eigsh(coarse, 3, which="LA", method="lanczos", tol=1e-13, max_iterations=4)
    b = torch.ones(coarse.shape[0], dtype=D)
    with pytest.raises(hodiff.ConvergenceError, match="only, as where a part of the model"):
        estimators.solve(coarse, b, damping=1.0, method="minres", tol=1e-12)


def test_spectra_determinants_and_solutions_of_coarse_products_match(coarse, matrix):
    values = torch.linalg.eigvalsh(matrix)
    damping = 1.0 - values[0].item()
    density = estimators.spectral_density(coarse, method="exact")
    torch.testing.assert_close(density.ritz_values.reshape(-1).sort().values, values, rtol=1e-5, atol=1e-6)
    logdet = estimators.logdet(coarse, damping=damping, method="exact").value
    assert logdet == pytest.approx((values + damping).log().sum().item(), rel=1e-6)
    b = torch.ones(coarse.shape[0], dtype=D)
    solution = estimators.solve(coarse, b, damping=damping).value
    expected = torch.linalg.solve(matrix + damping * torch.eye(len(b), dtype=D), b)
    torch.testing.assert_close(solution, expected, rtol=1e-4, atol=1e-5)


def test_condition_number_of_a_singular_coarse_operator_is_infinite(coarse):
    """The biases of the last layer shift all logits equally, which does not change the loss."""
    square = coarse.T @ coarse
    assert estimators.condition_number(square, method="dense").value == float("inf")


def test_sharpness_of_coarse_products_matches(coarse, matrix):
    found = estimators.sharpness(coarse, tol=1e-10, method="power", max_iterations=2000)
    assert found.value == pytest.approx(torch.linalg.eigvalsh(matrix)[-1].item(), rel=1e-6)


def test_products_under_autocast_are_coarse():
    weights = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

    def loss(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.tanh(x @ weights)
        return y.float().square().sum()

    x = torch.linspace(-1, 1, 60).reshape(10, 6)
    A = hodiff.HessianOperator(loss, x)
    found = estimators.eigsh(A, 2, which="LA", method="dense")
    assert found.converged
