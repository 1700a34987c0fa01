"""`A.at(x)` of operators composed of others equals the composition of the operators made at that point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators.cases import close
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff import InputError
from hodiff.operators import BlockDiagonalOperator, IdentityOperator, MatrixOperator

G = torch.Generator().manual_seed(0)
X, Y = (torch.randn(5, n, generator=G, dtype=torch.float64) for n in (2, 1))
MODEL = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
P = {name: 0.5 * torch.randn(each.shape, generator=G, dtype=torch.float64) for name, each in MODEL.named_parameters()}
Q = {name: each + 0.3 for name, each in P.items()}
N = sum(each.numel() for each in P.values())
M = torch.randn(N, N, generator=G, dtype=torch.float64)


def outputs(p: Any) -> Tensor:
    return functional_call(MODEL, p, (X,))


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "Hessian": lambda p: hodiff.HessianOperator(lambda p: F.mse_loss(outputs(p), Y), p),
    "Gauss-Newton": lambda p: hodiff.GaussNewtonOperator(MODEL, F.mse_loss, p, X, Y),
    "KFAC": lambda p: hodiff.KFACOperator(MODEL, F.mse_loss, p, X, Y),
    "Jacobian": lambda p: hodiff.JacobianOperator(outputs, p),
    "Gram": lambda p: hodiff.GramOperator(MODEL, p, X),
}
DERIVED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda A: A,
    "transposed": lambda A: A.T,
    "sum": lambda A: A + 2 * A,
    "multiple": lambda A: -0.5 * A,
    "product": lambda A: A.T @ A,
    "damped": lambda A: (A.T @ A).damped(0.1),
    "with a matrix": lambda A: A @ MatrixOperator(M[: A.shape[1], : A.shape[1]]) - A,
    "inverse": lambda A: (A.T @ A).damped(1.0).inverse("dense"),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
def test_compositions_move_with_their_operators(make: Callable[[Any], Any], derive: Callable[[Any], Any]) -> None:
    A, expected = derive(make(P)), derive(make(Q)).to_dense()
    before = A.to_dense()
    close(A.at(Q).to_dense(), expected, 1e-9)
    assert (before - expected).norm() > 1e-3 * expected.norm()
    close(A.to_dense(), before)


def test_block_diagonals_and_blocks() -> None:
    A, B = OPERATORS["Hessian"](P), OPERATORS["Hessian"](Q)
    close(BlockDiagonalOperator(A).at(Q).to_dense(), BlockDiagonalOperator(B).to_dense())
    part = {name: each for name, each in Q.items() if name.startswith("0.")}
    with pytest.raises(InputError, match=r"RestrictedOperator\.at: A: expected an operator with a point, or sums"):
        (2 * A).block("0").at(part)
    close((2 * A.at(Q)).block("0").to_dense(), 2 * B.block("0").to_dense())


@pytest.mark.parametrize(
    ("A", "x", "message"),
    [
        (lambda: MatrixOperator(M), M[0], r"MatrixOperator\.at: A: expected an operator with a point"),
        (lambda: IdentityOperator(P) + IdentityOperator(P), P, r"SumOperator\.at: A: expected an operator with a poi"),
        (lambda: OPERATORS["KFAC"](P).inverse(damping=1.0), Q, r"InverseFactored\.at: A: expected .* iterative inv"),
        (lambda: 2 * OPERATORS["Hessian"](P), M[0], r"HessianOperator\.at: x: expected the structure"),
        (lambda: 2 * OPERATORS["Jacobian"](P), M[0], r"JacobianOperator\.at: x: expected the structure"),
    ],
)
def test_operators_that_cannot_move_are_refused(A: Callable[[], Any], x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        A().at(x)
