"""The Kronecker product nearest to a positive semi-definite matrix, from a factor of the matrix."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 30


def nearest_kronecker(factor: Tensor) -> list[Tensor]:
    r"""Minimise $\| \sum_r \operatorname{vec}(R_r) \operatorname{vec}(R_r)^\top - B \otimes A \|_F$.

    Power iterations on the rearranged matrix, which is never formed: $B \propto \sum_r R_r A R_r^\top$ and
    $A \propto \sum_r R_r^\top B R_r$. They start at $A = I$, and keep both factors positive semi-definite.

    Args:
        factor: The matrices $R_r$, (rows, p, q).

    Returns:
        B (p, p), and A (q, q) with trace q.

    Source: C. F. Van Loan & N. Pitsianis, "Approximation with Kronecker products" (1993), sections 3 and 6.
    """
    q = factor.shape[2]
    A = torch.eye(q, dtype=factor.dtype, device=factor.device)
    B = torch.zeros(factor.shape[1], factor.shape[1], dtype=factor.dtype, device=factor.device)
    for _ in range(ITERATIONS):
        B = (factor @ A @ factor.mT).sum(0) / A.square().sum()
        size = B.square().sum()
        if not bool(size > 0):
            break
        new = (factor.mT @ B @ factor).sum(0) / size
        scale = new.trace() / q
        settled = bool((new / scale - A).norm() <= torch.finfo(A.dtype).eps ** 0.5 * A.norm())
        # The scale moves to B, so that A of different batches are comparable.
        A, B = new / scale, B * scale
        if settled:
            break
    return [B, A]
