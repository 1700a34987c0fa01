"""Cholesky factors, and eigenvalues and eigenvectors of symmetric matrices."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.jets import new_jet
from hodiff.taylor.registry import rule
from hodiff.taylor.rules.matrices.equations import between, mapped
from hodiff.taylor.series import Coefficient, Frame, minus, plus


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
