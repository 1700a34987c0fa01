"""Rules for inverses and linear systems; the factors of the value serve all coefficients.

Sums of products and linear maps of coefficients, for solving matrix equations order by order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hodiff.corrections.rules.linalg.factored_solves import FactoredSolve, factors
from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, new_jet, tensor_of
from hodiff.taylor.jets_in_arguments import Batched, along_directions, coefficients_of, moves, value_of
from hodiff.taylor.registry import rule
from hodiff.taylor.rules.arithmetic import with_value
from hodiff.taylor.series import Coefficient, Frame, minus, plus


def between(
    frame: Frame, function: Callable[..., Any], a: Sequence[Coefficient], b: Sequence[Coefficient], k: int
) -> Coefficient:
    """The sum of B(a_i, b_{k-i}) over 0 < i < k, as it enters coefficient k."""
    total: Coefficient = None
    for i in range(1, k):
        if a[i] is not None and b[k - i] is not None:
            pair = (Batched(a[i], frame.has_axis(i)), Batched(b[k - i], frame.has_axis(k - i)))
            total = plus(total, along_directions(function, pair, {}))
    return frame.summed(k, total)


def mapped(frame: Frame, k: int, function: Callable[[Any], Any], x: Coefficient) -> Coefficient:
    """Apply a linear map to coefficient k."""
    return None if x is None else along_directions(function, (Batched(x, frame.has_axis(k)),), {})


@rule("linalg.inv", analytic=True)
def inv(frame: Frame, func: Any, A: Any, *, out: None = None) -> Any:
    r"""$V_k = -V_0 \sum_{j=1}^k A_j V_{k-j}$."""
    a = A.coefficients
    V: list[Coefficient] = [torch.linalg.inv(a[0])]
    for k in range(1, frame.order + 1):
        known = plus(mapped(frame, k, lambda each: each @ V[0], a[k]), between(frame, torch.matmul, a, [*V, None], k))
        V.append(mapped(frame, k, lambda each: -(V[0] @ each), known))
    return new_jet(frame, V)


@rule("linalg.inv_ex", analytic=True)
def inv_ex(frame: Frame, func: Any, A: Any, *, check_errors: bool = False) -> Any:
    """Inverse, with torch's info."""
    found = torch.linalg.inv_ex(A.value, check_errors=check_errors)
    return type(found)([torch.linalg.inv(A), found.info])


def of_one_rank(A: Any, B: Any, *, vector: bool = False) -> tuple[Any, Any]:
    """Insert dimensions of one element in front, so that batches broadcast behind the axis of directions, too."""
    missing = A.ndim - B.ndim - vector
    if missing < 0:
        return A.reshape(*[1] * -missing, *A.shape), B
    return A, B.reshape(*[1] * missing, *B.shape) if missing else B


def is_vector(A: Any, B: Any) -> bool:
    """Whether torch takes the right-hand side of A X = B for a vector or for a batch of vectors."""
    return bool(B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1]))


def substituted(
    frame: Frame, a: Sequence[Coefficient], b: Sequence[Coefficient], solved: Callable[[Any], Any]
) -> list[Coefficient]:
    r"""$X_k = A_0^{-1} (B_k - \sum_{j=1}^k A_j X_{k-j})$; directions are columns of one solve."""

    def along(k: int, rhs: Any) -> Any:
        if rhs is None or not frame.has_axis(k):
            return None if rhs is None else solved(rhs)
        found = solved(rhs.movedim(0, -1).flatten(-2))
        return found.unflatten(-1, (rhs.shape[-1], len(rhs))).movedim(-1, 0)

    X: list[Coefficient] = [solved(b[0])]
    for k in range(1, frame.order + 1):
        known = plus(
            mapped(frame, k, lambda each: torch.matmul(each, X[0]), a[k]),
            between(frame, torch.matmul, a, [*X, None], k),
        )
        X.append(along(k, minus(b[k], known)))
    return X


@rule("linalg.solve", analytic=True)
def solve(frame: Frame, func: Any, A: Any, B: Any, *, left: bool = True, out: None = None) -> Any:
    """Solve a system for all coefficients, by one factorization."""
    if not left:
        return torch.linalg.solve(A.mT, B.mT).mT
    vector = is_vector(A, B)
    a, b = (coefficients_of(frame, each) for each in of_one_rank(A, B, vector=vector))
    if vector:
        b = [None if each is None else each.unsqueeze(-1) for each in b]
    if any(isinstance(each, Jet) for each in (*a, *b)):
        X = substituted(frame, a, b, lambda rhs: torch.linalg.solve(a[0], rhs))
    else:
        pair, pivots, _ = factors(a[0], check_errors=True)
        X = substituted(frame, a, b, lambda rhs: FactoredSolve.call(a[0], rhs, pair, pivots, False))
    return new_jet(frame, [None if each is None else each.squeeze(-1) for each in X] if vector else X)


@rule("linalg.lu_solve", analytic=True)
def lu_solve(
    frame: Frame, func: Any, LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False, out: None = None
) -> Any:
    """Solve by the two triangles: in a vmap torch's function is wrong for batches of different ranks."""
    if not left:
        return torch.linalg.lu_solve(LU, pivots, B.mH, adjoint=not adjoint).mH
    P, _, _ = torch.lu_unpack(tensor_of(LU).detach(), pivots, unpack_data=False)
    if adjoint:
        between = torch.linalg.solve_triangular(LU.mH, B, upper=False)
        return P @ torch.linalg.solve_triangular(LU.mH, between, upper=True, unitriangular=True)
    between = torch.linalg.solve_triangular(LU, P.mT @ B, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(LU, between, upper=True)


@rule("lu_solve", analytic=True)
def classic_lu_solve(frame: Frame, func: Any, B: Any, LU: Any, pivots: Any, *, out: None = None) -> Any:
    """Solve with a factored matrix, whose factors are the last arguments."""
    return torch.linalg.lu_solve(LU, pivots, B)


@rule("linalg.lstsq", analytic=True)
def lstsq(frame: Frame, func: Any, A: Any, B: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    """Least squares by the pseudoinverse: in a vmap torch's function is wrong for batches that broadcast."""
    vector = B.ndim == A.ndim - 1
    if vector and B.shape != A.shape[:-1]:
        raise InputError(
            f"jet: linalg.lstsq: B: expected as many dimensions as A of shape {tuple(A.shape)}, or vectors of shape "
            f"{tuple(A.shape[:-1])}, got {tuple(B.shape)}, of which torch makes a batch of its own; write "
            "B.unsqueeze(0) for a matrix, or B.unsqueeze(-1) for vectors."
        )
    found = torch.linalg.lstsq(value_of(frame, A), value_of(frame, B), rcond, driver=driver)
    right = B.unsqueeze(-1) if vector else B
    solution = torch.linalg.pinv(A) @ right
    residuals, sizes = found.residuals, found.singular_values
    if residuals.numel():
        residuals = with_value(frame, residuals, torch.abs(A @ solution - right).square().sum(-2))
    if sizes.numel() and moves(frame, A):
        sizes = with_value(frame, sizes, torch.linalg.svdvals(A))
    solution = with_value(frame, found.solution, solution.squeeze(-1) if vector else solution)
    return type(found)([solution, residuals, found.rank, sizes])


@rule("linalg.solve_triangular", analytic=True)
def solve_triangular(
    frame: Frame,
    func: Any,
    A: Any,
    B: Any,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
    out: None = None,
) -> Any:
    """Solve a triangular system; elements outside of the triangle are ignored."""
    options = {"unitriangular": unitriangular}
    if not left:
        return torch.linalg.solve_triangular(A.mT, B.mT, upper=not upper, **options).mT
    a, b = (coefficients_of(frame, each) for each in of_one_rank(A, B))
    diagonal = (1 if upper else -1) if unitriangular else 0

    def inside(matrix: Any) -> Any:
        return torch.triu(matrix, diagonal) if upper else torch.tril(matrix, diagonal)

    def solved(rhs: Any) -> Any:
        return torch.linalg.solve_triangular(a[0], rhs, upper=upper, **options)

    moving = [mapped(frame, k, inside, each) for k, each in enumerate(a) if k]
    return new_jet(frame, substituted(frame, [a[0], *moving], b, solved))
