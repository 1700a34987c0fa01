"""Randomized range of an operator, and its ranges without one test vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.estimators.probes import draw
from hodiff.estimators.results import precise
from hodiff.estimators.view import View

# Up to this size random sign vectors may be dependent, which must not count as a complete range.
SMALL = 64


@dataclass(frozen=True, eq=False)
class Range:
    r"""$A \Omega = Q R$ for random test vectors $\Omega$, in high precision.

    If the rank of $A \Omega$ is below the number of test vectors, Q has as many columns as the rank. Q then spans the
    range of A with probability one, and `complete` is true.
    """

    probes: Tensor
    basis: Tensor
    triangle: Tensor
    complete: bool
    rounding: float

    def left_out(self) -> Tensor:
        """Return unit columns $s_i$ of $R^{-T}$: $Q (I - s_i s_i^T)$ spans the products without the i-th."""
        identity = torch.eye(len(self.triangle), dtype=self.triangle.dtype, device=self.triangle.device)
        inverse = torch.linalg.solve_triangular(self.triangle, identity, upper=True).T
        return inverse / torch.linalg.vector_norm(inverse, dim=0)


def find_range(view: View, count: int, kind: str, generator: torch.Generator) -> Range:
    """Draw `count` test vectors, multiply them by `count` products, and orthonormalize."""
    probes = draw(view, kind, count, generator)
    while view.total <= SMALL and int(torch.linalg.matrix_rank(view.qr(precise(probes))[1])) < count:
        probes = draw(view, kind, count, generator)
    basis, triangle = view.qr(precise(view.matmat(probes)))
    left, singular, _ = torch.linalg.svd(triangle)
    rounding = 4 * torch.finfo(view.dtype).eps * singular.norm().item()
    rank = int((singular > rounding).sum())
    complete = rank < count
    if complete:
        basis, triangle = basis @ left[:, :rank], left[:, :rank].T @ triangle
    return Range(precise(probes), basis, triangle, complete, rounding)
