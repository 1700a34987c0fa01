"""An operator that is converted to another dtype equals an operator that is created in that dtype."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from operators.cases import close
from torch import Tensor, nn

import hodiff
from hodiff import InputError
from hodiff.operators import DiagonalOperator, IdentityOperator, LinearOperator, MatrixOperator

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(6, 4, generator=GENERATOR)
LABELS = torch.randint(3, (6,), generator=GENERATOR)
X = torch.randn(4, generator=GENERATOR)
SCALES = X.exp()
M = torch.randn(4, 4, generator=GENERATOR)


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).to(dtype).eval()


def model_and_loss(kind: Any, dtype: torch.dtype, **options: Any) -> LinearOperator:
    net = network(dtype)
    point = {name: each.detach() for name, each in net.named_parameters()}
    batches = [(INPUTS[:4].to(dtype), LABELS[:4]), (INPUTS[4:].to(dtype), LABELS[4:])]
    operator: LinearOperator = kind(net, F.cross_entropy, point, data=batches, **options)
    return operator


def quartic(x: Tensor, c: Tensor) -> Tensor:
    return (c * x**4).sum() + x.prod()


KINDS: dict[str, Callable[[torch.dtype], LinearOperator]] = {
    "hessian": lambda d: hodiff.HessianOperator(quartic, X.to(d), SCALES.to(d)),
    "hessian over data": lambda d: hodiff.HessianOperator(quartic, X.to(d), data=[M.to(d), M[:2].to(d)]),
    "gauss-newton": lambda d: model_and_loss(hodiff.GaussNewtonOperator, d),
    "fisher": lambda d: model_and_loss(hodiff.FisherOperator, d),
    "empirical fisher": lambda d: model_and_loss(hodiff.EmpiricalFisherOperator, d),
    "jacobian": lambda d: hodiff.JacobianOperator(lambda x, m: (m @ x).tanh(), X.to(d), M.to(d)),
    "transposed": lambda d: hodiff.JacobianOperator(lambda x, m: (m @ x).tanh(), X.to(d), M.to(d)).T,
    "matrix": lambda d: MatrixOperator(M.to(d)),
    "sum": lambda d: (MatrixOperator(M.to(d)) - 2 * DiagonalOperator(X.to(d))) @ IdentityOperator(X.to(d)),
    "multiple": lambda d: torch.tensor(0.5, dtype=d) * DiagonalOperator({"a": X.to(d)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_converted_operator_computes_in_the_new_dtype(kind: str) -> None:
    """The result has float64 accuracy, which casting float32 products would lack."""
    single, double = KINDS[kind](torch.float32), KINDS[kind](torch.float64)
    before = single.to_dense()
    moved = single.to(dtype=torch.float64)
    assert type(moved) is type(double)
    assert moved.dtype == torch.float64
    close(moved.to_dense(), double.to_dense(), 1e-14)
    close(moved.T.to_dense(), double.to_dense().T, 1e-14)
    assert single.dtype == torch.float32
    assert single.to_dense().equal(before)
    assert single.to("cpu").to_dense().equal(before)


def test_converted_modules_are_copies() -> None:
    net = network(torch.float32)
    point = {name: each.detach() for name, each in net.named_parameters()}
    A = hodiff.GaussNewtonOperator(net, F.cross_entropy, point, INPUTS, LABELS)
    A.to(dtype=torch.float64).to_dense()
    assert {each.dtype for each in net.parameters()} == {torch.float32}


def test_rejects_bad_conversions() -> None:
    A = KINDS["gauss-newton"](torch.float32)
    for wrong, message in (
        (lambda: A.to(dtype=torch.int64), "to: dtype: expected a floating-point dtype"),
        (lambda: A.to(dtype="float64"), "to: dtype: expected a floating-point dtype"),
        (lambda: A.to("abacus"), "to: device: expected a device"),
        (lambda: A.block("0").to(dtype=torch.float64), r"to: A: .* use the block of A.to"),
        (lambda: A.inverse().to(dtype=torch.float64), "to: A: expected an operator that supports"),
        (lambda: (A.block("0").inverse() + A.block("0")).to(dtype=torch.float64), "to: A:"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()
    block = A.to(dtype=torch.float64).block("0")
    close(block.to_dense(), KINDS["gauss-newton"](torch.float64).block("0").to_dense(), 1e-14)


def test_to_accepts_a_positional_dtype():
    A = hodiff.HessianOperator(lambda x: (x**3).sum(), torch.ones(2))
    assert A.to(torch.float64).dtype is torch.float64


def test_keys_in_another_order_raise():
    x, v = {"a": torch.ones(2), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.ones(2)}

    def f(x):
        return (x["a"] ** 3).sum() * x["b"].sum()

    for product in (lambda: hodiff.hvp(f, x, v), lambda: hodiff.HessianOperator(f, x) @ v):
        with pytest.raises(hodiff.InputError, match="the same keys in another order"):
            product()


def test_to_sparse_rejects_symmetric_coloring_of_asymmetric_operators():
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    star = hodiff.sparse.color(matrix.numpy() != 0)
    with pytest.raises(InputError, match=r"not known to be symmetric, got Coloring\('star'"):
        MatrixOperator(matrix).to_sparse(star)
    columns = hodiff.sparse.color(matrix.numpy() != 0, "columns")
    assert torch.equal(MatrixOperator(matrix).to_sparse(columns).to_dense(), matrix)
    symmetric = MatrixOperator(matrix + matrix.T, symmetric=True)
    assert torch.equal(symmetric.to_sparse(star).to_dense(), matrix + matrix.T)


def test_complex_vectors_of_scipy() -> None:
    matrix = torch.randn(3, 3, dtype=torch.float64)
    v = np.array([1 + 2j, 0.5j, -1.0])
    np.testing.assert_allclose(MatrixOperator(matrix).to_scipy() @ v, matrix.numpy() @ v)
