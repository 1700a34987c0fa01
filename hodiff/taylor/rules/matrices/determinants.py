"""Determinants and their logarithms."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from hodiff.errors import InputError
from hodiff.taylor.jets import new_jet, tensor_of
from hodiff.taylor.registry import rule
from hodiff.taylor.rules.matrices.equations import between, mapped
from hodiff.taylor.series import Coefficient, Frame, minus, times
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped


@rule("logdet")
def logdet(frame: Frame, func: Any, A: Any) -> Any:
    """Logarithm of the determinant by slogdet; NaN where the determinant is negative."""
    _, found = torch.linalg.slogdet(A)
    return new_jet(frame, [torch.logdet(A.value), *found.coefficients[1:]])


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
        # The last order needs only the trace, which takes no product of matrices.
        if k == frame.order:
            last = mapped(frame, k, lambda each: paired(each, inverse), times(k, a[k]))
            total = minus(last, between(frame, paired, [*B, None], [*over, None], k))
        else:
            B.append(minus(times(k, over[k]), between(frame, torch.matmul, [*B, None], over, k)))
            total = mapped(frame, k, trace, B[k])
        v.append(None if total is None else total / k)
    return type(found)([found.sign, new_jet(frame, v)])


@rule("det", "linalg.det")
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
            f"jet: det: expected a matrix of up to {_MOST} rows, or one that is not nearly singular, got {n} rows: the "
            "logarithm of its determinant, torch.linalg.slogdet, is what larger ones are for."
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
