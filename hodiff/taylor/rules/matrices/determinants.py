"""Rules for determinants, Cholesky factors, and eigenvalues and eigenvectors of symmetric matrices."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from hodiff.errors import InputError
from hodiff.taylor.jets import new_jet, tensor_of
from hodiff.taylor.registry import rule
from hodiff.taylor.rules.matrices.solutions import between, mapped
from hodiff.taylor.series import Coefficient, Frame, minus, plus, times
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped


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
    found = new_jet(frame, L)
    return found.mT if upper else found


@rule("linalg.eigh", "linalg.eigvalsh")
def eigh(frame: Frame, func: Any, A: Any, UPLO: str = "L", *, out: None = None) -> Any:
    """Distinct eigenvalues: in the eigenbasis, order k gives eigenvalues on the diagonal, eigenvectors off it."""
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
    eigenvalues = new_jet(frame, lam)
    if getattr(func, "__name__", "").endswith("eigvalsh"):
        return eigenvalues
    V = [vectors, *(mapped(frame, k, lambda each: vectors @ each, C[k]) for k in range(1, frame.order + 1))]
    return type(found)([eigenvalues, new_jet(frame, V)])


@rule("logdet")
def logdet(frame: Frame, func: Any, A: Any) -> Any:
    """Logarithm of the determinant by slogdet; NaN where the determinant is negative."""
    _, found = torch.linalg.slogdet(A)
    return new_jet(frame, [torch.logdet(A.value), *found.coefficients[1:]])


@rule("linalg.slogdet")
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
        # The last order needs only the trace, which takes no product of matrices.
        if k == frame.order:
            last = mapped(frame, k, lambda each: paired(each, inverse), times(k, a[k]))
            total = minus(last, between(frame, paired, [*B, None], [*over, None], k))
        else:
            B.append(minus(times(k, over[k]), between(frame, torch.matmul, [*B, None], over, k)))
            total = mapped(frame, k, trace, B[k])
        v.append(None if total is None else total / k)
    return type(found)([found.sign, new_jet(frame, v)])


@rule("linalg.det")
def det(frame: Frame, func: Any, A: Any) -> Any:
    """Determinant by minors, which divide by nothing, or by slogdet for large regular matrices."""
    n = A.value.shape[-1]
    if n == 0:
        return torch.linalg.det(A.value)
    if n == 1:
        return A[..., 0, 0]
    if n == 2:
        return A[..., 0, 0] * A[..., 1, 1] - A[..., 0, 1] * A[..., 1, 0]
    if n == 3:
        return (A[..., 0, :] * torch.linalg.cross(A[..., 1, :], A[..., 2, :])).sum(-1)
    if n <= _BY_MINORS or not _is_regular(tensor_of(A)):
        return _by_minors(A, n)
    sign, found = torch.linalg.slogdet(A)
    return sign * torch.exp(found)


# Expansion by minors takes n 2^(n-1) products.
_BY_MINORS, _MOST = 5, 12


def _is_regular(values: torch.Tensor) -> bool:
    """Whether derivatives by the inverse keep their digits; True where numbers cannot be inspected."""
    if torch.compiler.is_compiling() or is_wrapped(values):
        return True
    sizes = torch.linalg.svdvals(values.detach())
    return bool((sizes[..., -1] > torch.finfo(values.dtype).eps ** 0.25 * sizes[..., 0]).all())


def _by_minors(A: Any, n: int) -> Any:
    """Compute a determinant by minors of the first k rows, from k = 1 to n."""
    if n > _MOST:
        raise InputError(
            f"jet: det: expected a matrix of up to {_MOST} rows, or one that is not nearly singular, got {n} rows: "
            "use the logarithm of the determinant, torch.linalg.slogdet, for larger matrices."
        )
    minors: dict[tuple[int, ...], Any] = {(j,): A[..., 0, j] for j in range(n)}
    for k in range(1, n):
        minors = {
            columns: sum(
                (-1) ** (k - i) * (A[..., k, j] * minors[columns[:i] + columns[i + 1 :]]) for i, j in enumerate(columns)
            )
            for columns in combinations(range(n), k + 1)
        }
    return minors[tuple(range(n))]
