"""Tests of block-diagonal operators against the dense matrix of the whole operator."""

import copy

import pytest
import torch
import torch.nn.functional as F
from operators.cases import close, problem
from torch import Tensor

import hodiff
from hodiff.operators import BlockDiagonalOperator, MatrixOperator

P = problem("images")
A = hodiff.GaussNewtonOperator(P.model, F.cross_entropy, P.x, P.inputs, P.targets)
# Of the convolution, and of the linear layer.
SIZES = {"layer": [10, 18], "parameter": [8, 2, 16, 2]}


def dense(by: str) -> Tensor:
    """Keep the diagonal blocks of the matrix, which has the leaves one after another."""
    whole, mask, start = P.gauss_newton(), torch.zeros(28, 28).double(), 0
    for size in SIZES[by]:
        mask[start : start + size, start : start + size] = 1
        start += size
    return mask * whole


@pytest.mark.parametrize("by", SIZES)
def test_closed_forms(by: str) -> None:
    B, expected = BlockDiagonalOperator(A, by=by), dense(by)
    assert [block.matrix.shape[0] for block in B.blocks] == SIZES[by]
    close(B.to_dense(), expected)
    close(B @ torch.eye(28).double()[:, :3], expected[:, :3])
    shifted = expected + 0.1 * torch.eye(28).double()
    close(B.inverse(damping=0.1).to_dense(), torch.linalg.inv(shifted), 1e-10)
    assert B.logdet(damping=0.1).value == pytest.approx(float(torch.logdet(shifted)))
    assert B.det(damping=1.0).value == pytest.approx(float(torch.det(expected + torch.eye(28).double())))
    assert B.trace().value == pytest.approx(float(expected.trace()))
    assert B.frobenius_norm().value == pytest.approx(float(expected.norm()))
    close(B.diagonal(exact=True).value, expected.diagonal())
    found = B.eigh()
    close(found.eigenvalues, torch.linalg.eigvalsh(expected))
    Q = found.eigenvectors.to_dense()
    close(Q @ torch.diag(found.eigenvalues) @ Q.mT, expected)
    close((2 * B).damped(0.5).to_dense(), 2 * expected + 0.5 * torch.eye(28).double())


def test_pytrees_and_groups_in_another_order() -> None:
    names = [["3.bias", "0.weight"], ["0.bias", "3.weight"]]
    B = BlockDiagonalOperator(A, by=names)
    whole, mask = P.gauss_newton(), torch.zeros(28, 28).double()
    for some in ([*range(8), 26, 27], range(8, 26)):
        index = torch.tensor(list(some))
        mask[index[:, None], index] = 1
    close(B.to_dense(), mask * whole)
    v = {name: torch.randn_like(leaf) for name, leaf in P.x.items()}
    product = B.inverse(damping=0.1) @ (B.damped(0.1) @ v)
    for name, leaf in v.items():
        close(product[name], leaf, 1e-10)


def test_hessians_copies_and_conversions() -> None:
    H = hodiff.HessianOperator(P.objective(), P.x, (P.inputs, P.targets))
    B = BlockDiagonalOperator(H)
    expected = dense("layer") != 0
    close(B.to_dense(), torch.where(expected, P.hessian(), 0), 1e-11)
    close(copy.deepcopy(BlockDiagonalOperator(A)).to_dense(), dense("layer"))
    assert BlockDiagonalOperator(A).to(dtype=torch.float32).to_dense().dtype == torch.float32


@pytest.mark.parametrize("single", ["a", "b"])
def test_parameters_of_two_dtypes(single: str) -> None:
    x = {"a": torch.tensor([0.5, 2.0]).double(), "b": torch.tensor([1.0, 3.0, 0.25]).double()}
    x[single] = x[single].float()

    def f(x: dict[str, Tensor]) -> Tensor:
        return (x["a"] ** 4).sum() + (x["b"] ** 3).sum() + (x["a"].sum() * x["b"].sum()).double()

    expected = torch.cat([12 * x["a"].double() ** 2, 6 * x["b"].double()])
    B = BlockDiagonalOperator(hodiff.HessianOperator(f, x), by="parameter")
    close(B.to_dense(), expected.diag(), 1e-6)
    assert B.to_dense().dtype == torch.float64
    close(B.inverse(damping=0.5).to_dense(), (1 / (expected + 0.5)).diag(), 1e-6)
    product = B @ x
    assert {name: each.dtype for name, each in product.items()} == {name: each.dtype for name, each in x.items()}
    close(product["b"].double(), 6 * x["b"].double() ** 2, 1e-6)


def test_refusals() -> None:
    with pytest.raises(hodiff.InputError, match=r"memory_budget: expected at least .* 3.weight, 3.bias has 18 columns"):
        BlockDiagonalOperator(A, memory_budget=100)
    with pytest.raises(hodiff.InputError, match="by: expected 'layer', 'parameter', or lists"):
        BlockDiagonalOperator(A, by=[["0.weight"]])
    with pytest.raises(hodiff.InputError, match="by: expected one of 'layer', 'parameter'"):
        BlockDiagonalOperator(A, by="row")
    with pytest.raises(hodiff.InputError, match="expected a symmetric operator"):
        BlockDiagonalOperator(MatrixOperator(torch.ones(2, 3)))
    with pytest.raises(hodiff.InputError, match="A: expected a hodiff LinearOperator"):
        BlockDiagonalOperator(torch.eye(2))
    x = {"a": torch.ones(2)}
    B = BlockDiagonalOperator(2 * hodiff.HessianOperator(lambda x: (x["a"] ** 4).sum(), x))
    close(B.to_dense(), 24 * torch.eye(2))
    x["a"].add_(1)
    with pytest.raises(hodiff.InputError, match="in place"):
        B @ torch.ones(2)


class Unused(torch.nn.Module):
    """A model with a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("by", ["layer", "parameter"])
def test_unused_layers_have_zero_blocks(by: str) -> None:
    model = Unused().double()
    x = {name: p.detach() for name, p in model.named_parameters()}
    G = hodiff.GaussNewtonOperator(model, F.mse_loss, x, torch.randn(4, 3).double(), torch.zeros(4, 2).double())
    found, expected = BlockDiagonalOperator(G, by=by).to_dense(), G.to_dense()
    if by == "parameter":
        expected[:6, 6:8], expected[6:8, :6] = 0, 0
    close(found, expected)
