"""Rules for inverses and linear systems; the factors of the value serve all coefficients.

Sums of products and linear maps of coefficients, for solving matrix equations order by order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hodiff.taylor.jets import new_jet
from hodiff.taylor.jets_in_arguments import Batched, along_directions, coefficients_of
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Coefficient, Frame, minus, plus
from hodiff.torch_internals.autograd.transforms import in_transform


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


@rule("linalg.solve", analytic=True)
def solve(frame: Frame, func: Any, A: Any, B: Any, *, left: bool = True, out: None = None) -> Any:
    r"""$X_k = A_0^{-1} (B_k - \sum_{j=1}^k A_j X_{k-j})$, by one factorization."""
    if not left:
        return torch.linalg.solve(A.mT, B.mT).mT
    a, b = coefficients_of(frame, A), coefficients_of(frame, B)
    vector = b[0].ndim == 1 or (b[0].ndim == a[0].ndim - 1 and tuple(b[0].shape) == tuple(a[0].shape[:-1]))
    factors, pivots = torch.linalg.lu_factor(a[0])

    def column(x: Any) -> Any:
        return x.unsqueeze(-1) if vector else x

    def solved(rhs: Any) -> Any:
        # Under vmap torch's lu_solve is wrong for right-hand sides with more dimensions than the factors have.
        if in_transform():
            found = torch.linalg.solve(a[0], column(rhs))
        else:
            found = torch.linalg.lu_solve(factors, pivots, column(rhs))
        return found.squeeze(-1) if vector else found

    def applied(matrix: Any, x: Any) -> Any:
        found = matrix @ column(x)
        return found.squeeze(-1) if vector else found

    X: list[Coefficient] = [solved(b[0])]
    for k in range(1, frame.order + 1):
        known = plus(
            mapped(frame, k, lambda each: applied(each, X[0]), a[k]), between(frame, applied, a, [*X, None], k)
        )
        X.append(mapped(frame, k, solved, minus(b[k], known)))
    return new_jet(frame, X)


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
    a, b = coefficients_of(frame, A), coefficients_of(frame, B)
    triangle = torch.triu if upper else torch.tril
    inside = 1 if unitriangular else 0

    def cut(each: Any) -> Any:
        return triangle(each, inside if upper else -inside)

    def solved(rhs: Any) -> Any:
        return torch.linalg.solve_triangular(a[0], rhs, upper=upper, left=left, unitriangular=unitriangular)

    def applied(matrix: Any, x: Any) -> Any:
        return cut(matrix) @ x if left else x @ cut(matrix)

    X: list[Coefficient] = [solved(b[0])]
    for k in range(1, frame.order + 1):
        known = plus(
            mapped(frame, k, lambda each: applied(each, X[0]), a[k]), between(frame, applied, a, [*X, None], k)
        )
        X.append(mapped(frame, k, solved, minus(b[k], known)))
    return new_jet(frame, X)
