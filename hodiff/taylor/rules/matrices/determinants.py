"""Determinants and their logarithms."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.jets import Jet
from hodiff.taylor.registry import rule
from hodiff.taylor.rules.matrices.equations import between, mapped
from hodiff.taylor.series import Coefficient, Frame, minus, times


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
