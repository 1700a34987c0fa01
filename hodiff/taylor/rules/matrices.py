"""Linear algebra: what an equation defines is found coefficient by coefficient, with the value's factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hodiff.errors import InputError
from hodiff.taylor.jets import Jet
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Coefficient, Frame, minus, plus, times
from hodiff.taylor.substitution import Batched, along_directions, moves


def series_of(frame: Frame, x: Any) -> Sequence[Coefficient]:
    """The coefficients of a jet, or of a constant."""
    return x.coefficients if moves(frame, x) else (x, *[None] * frame.order)


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
    """A linear map of coefficient k."""
    return None if x is None else along_directions(function, (Batched(x, frame.has_axis(k)),), {})


@rule("inverse", "linalg.inv", analytic=True)
def inv(frame: Frame, func: Any, A: Any, *, out: None = None) -> Any:
    r"""$V_k = -V_0 \sum_{j=1}^k A_j V_{k-j}$."""
    a = A.coefficients
    V: list[Coefficient] = [torch.linalg.inv(a[0])]
    for k in range(1, frame.order + 1):
        known = plus(mapped(frame, k, lambda each: each @ V[0], a[k]), between(frame, torch.matmul, a, [*V, None], k))
        V.append(mapped(frame, k, lambda each: -(V[0] @ each), known))
    return Jet(frame, V)


@rule("linalg.inv_ex", analytic=True)
def inv_ex(frame: Frame, func: Any, A: Any, *, check_errors: bool = False) -> Any:
    """As inv, with torch's info."""
    found = torch.linalg.inv_ex(A.value, check_errors=check_errors)
    return type(found)([torch.linalg.inv(A), found.info])


@rule("linalg.solve", analytic=True)
def solve(frame: Frame, func: Any, A: Any, B: Any, *, left: bool = True, out: None = None) -> Any:
    r"""$X_k = A_0^{-1} (B_k - \sum_{j=1}^k A_j X_{k-j})$, by one factorization."""
    if not left:
        return torch.linalg.solve(A.mT, B.mT).mT
    a, b = series_of(frame, A), series_of(frame, B)
    vector = b[0].ndim == 1 or (b[0].ndim == a[0].ndim - 1 and tuple(b[0].shape) == tuple(a[0].shape[:-1]))
    factors, pivots = torch.linalg.lu_factor(a[0])

    def column(x: Any) -> Any:
        return x.unsqueeze(-1) if vector else x

    def solved(rhs: Any) -> Any:
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
    return Jet(frame, X)


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
    """As solve; what lies outside of the triangle does not count."""
    a, b = series_of(frame, A), series_of(frame, B)
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
    return Jet(frame, X)


@rule("cholesky", "linalg.cholesky")
def cholesky(frame: Frame, func: Any, A: Any, upper: bool = False, *, out: None = None) -> Any:
    r"""$L_k = L_0\, \Phi(L_0^{-1} (A_k - \sum_{0<j<k} L_j L_{k-j}^\top) L_0^{-\top})$, Φ the lower half."""
    a = A.coefficients
    L: list[Coefficient] = [torch.linalg.cholesky(a[0])]

    def half(matrix: Any) -> Any:
        low = torch.tril(matrix)
        return low - torch.diag_embed(torch.diagonal(low, dim1=-2, dim2=-1)) / 2

    def factored(rhs: Any) -> Any:
        # torch reads the lower triangle, and differentiates as if the matrix were the mean of itself and its transpose.
        rhs = (rhs + rhs.mH) / 2
        left = torch.linalg.solve_triangular(L[0], rhs, upper=False)
        both = torch.linalg.solve_triangular(L[0].mH, left, upper=True, left=False)
        return L[0] @ half(both)

    for k in range(1, frame.order + 1):
        known = between(frame, lambda x, y: x @ y.mH, [*L, None], [*L, None], k)
        L.append(mapped(frame, k, factored, minus(a[k], known)))
    found = Jet(frame, L)
    return found.mT if upper else found


@rule("logdet")
def logdet(frame: Frame, func: Any, A: Any) -> Any:
    """That of slogdet, NaN where the determinant is negative."""
    _, found = torch.linalg.slogdet(A)
    return Jet(frame, [torch.logdet(A.value), *found.coefficients[1:]])


@rule("slogdet", "linalg.slogdet")
def slogdet(frame: Frame, func: Any, A: Any, *, out: None = None) -> Any:
    r"""$k v_k = \mathrm{tr}(B_k)$ with $B_k = (k A_k - \sum_{j=1}^{k-1} B_j A_{k-j}) A_0^{-1}$, the series of A'/A."""
    a = A.coefficients
    found = torch.linalg.slogdet(a[0])
    inverse = torch.linalg.inv(a[0])
    v: list[Coefficient] = [found.logabsdet]
    B: list[Coefficient] = [None]

    def trace(x: Any) -> Any:
        return torch.diagonal(x, dim1=-2, dim2=-1).sum(-1)

    def paired(x: Any, y: Any) -> Any:
        return (x * y.mT).sum((-2, -1))

    over = [None, *(mapped(frame, k, lambda each: each @ inverse, a[k]) for k in range(1, frame.order))]
    for k in range(1, frame.order + 1):
        # Of the last one the trace alone is asked for, which takes no product of matrices.
        if k == frame.order:
            last = mapped(frame, k, lambda each: paired(each, inverse), times(k, a[k]))
            total = minus(last, between(frame, paired, [*B, None], [*over, None], k))
        else:
            B.append(minus(times(k, over[k]), between(frame, torch.matmul, [*B, None], over, k)))
            total = mapped(frame, k, trace, B[k])
        v.append(None if total is None else total / k)
    return type(found)([found.sign, Jet(frame, v)])


@rule("det", "linalg.det")
def det(frame: Frame, func: Any, A: Any) -> Any:
    """By elimination without divisions by what may be 0: of 1 by 1, 2 by 2 and 3 by 3 ones; else by logarithm."""
    n = A.value.shape[-1]
    if n == 0:
        return torch.linalg.det(A.value)
    if n == 1:
        return A[..., 0, 0]
    if n == 2:
        return A[..., 0, 0] * A[..., 1, 1] - A[..., 0, 1] * A[..., 1, 0]
    if n == 3:
        return (A[..., 0, :] * torch.linalg.cross(A[..., 1, :], A[..., 2, :])).sum(-1)
    sign, found = torch.linalg.slogdet(A)
    return sign * torch.exp(found)


@rule("linalg.eigh", "linalg.eigvalsh")
def eigh(frame: Frame, func: Any, A: Any, UPLO: str = "L", *, out: None = None) -> Any:
    """Distinct eigenvalues: in their basis, the equation of order k gives them on its diagonal, vectors off it."""
    # With C = V0' V, so that C0 = I: the lower orders give L0 Ck - Ck L0 - Lk, and V'V = I gives the diagonal of Ck.
    found = torch.linalg.eigh(A.value, UPLO)
    values, vectors = found
    n = values.shape[-1]
    B = [None if each is None else (each + each.mT) / 2 for each in A.coefficients]
    B = [None, *(mapped(frame, k, lambda each: vectors.mT @ each @ vectors, B[k]) for k in range(1, frame.order + 1))]
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    eye = torch.eye(n, dtype=values.dtype, device=values.device)
    inverse_gaps = (1 - eye) / (gaps + eye)
    C: list[Coefficient] = [eye.expand(vectors.shape)]
    lam: list[Coefficient] = [values]

    def scaled(vectors: Any, by: Any) -> Any:
        return vectors * by.unsqueeze(-2)

    for k in range(1, frame.order + 1):
        rhs = plus(B[k], between(frame, torch.matmul, B, [*C, None], k))
        rhs = minus(rhs, between(frame, scaled, [*C, None], [*lam, None], k))
        lam.append(mapped(frame, k, lambda each: torch.diagonal(each, dim1=-2, dim2=-1), rhs))
        norm = between(frame, lambda x, y: (x * y).sum(-2), [*C, None], [*C, None], k)
        off = mapped(frame, k, lambda each: inverse_gaps * each, rhs)
        own = mapped(frame, k, lambda each: torch.diag_embed(-each / 2), norm)
        C.append(plus(off, own))
    eigenvalues = Jet(frame, lam)
    if getattr(func, "__name__", "").endswith("eigvalsh"):
        return eigenvalues
    V = [vectors, *(mapped(frame, k, lambda each: vectors @ each, C[k]) for k in range(1, frame.order + 1))]
    return type(found)([eigenvalues, Jet(frame, V)])


@rule("matrix_power", "linalg.matrix_power", analytic=True)
def matrix_power(frame: Frame, func: Any, A: Any, n: int, *, out: None = None) -> Any:
    """By squaring."""
    if n == 0:
        return func(A.value, 0)
    base = torch.linalg.inv(A) if n < 0 else A
    n, result = abs(n), None
    while n:
        if n % 2:
            result = base if result is None else result @ base
        base, n = (base @ base, n // 2) if n > 1 else (base, 0)
    return result


@rule("prod", analytic=True)
def prod(frame: Frame, func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Halves with each other, which zeros do not disturb."""
    x = x if dtype is None else x.to(dtype)
    if dim is None:
        x, dim, keepdim = x.reshape(-1), 0, False
    if x.ndim == 0:
        return x
    x = torch.movedim(x, dim, -1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = torch.cat((x[..., :half] * x[..., half : 2 * half], rest), -1)
    if x.shape[-1] == 0:
        return torch.prod(x.value, -1)
    return torch.movedim(x, -1, dim) if keepdim else x.squeeze(-1)


@rule("cumprod", analytic=True)
def cumprod(frame: Frame, func: Any, x: Any, dim: int, *, dtype: Any = None, out: None = None) -> Any:
    """Each times what stands 1, 2, 4, ... before it."""
    x = x if dtype is None else x.to(dtype)
    if x.ndim == 0:
        return x
    x, step = torch.movedim(x, dim, -1), 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], x[..., step:] * x[..., :-step]), -1)
        step *= 2
    return torch.movedim(x, -1, dim)


@rule("logcumsumexp")
def logcumsumexp(frame: Frame, func: Any, x: Any, dim: int, *, out: None = None) -> Any:
    """Each with what stands 1, 2, 4, ... before it."""
    if x.ndim == 0:
        return x
    x, step = torch.movedim(x, dim, -1), 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], torch.logaddexp(x[..., step:], x[..., :-step])), -1)
        step *= 2
    return torch.movedim(x, -1, dim)


@rule("as_strided")
def as_strided(frame: Frame, func: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """The elements at those places of the value's memory, which must hold no others."""
    value = x.value
    if not value.is_contiguous() or value.storage_offset():
        raise InputError("jet: as_strided is known for contiguous tensors alone: call x.contiguous().clone() before.")
    places = torch.arange(value.numel(), device=value.device).as_strided(size, stride, storage_offset or 0)
    return torch.take(x, places)
