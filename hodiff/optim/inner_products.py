"""Inner products and norms of vectors, on one process or over the shards of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.distributed.layouts import Layout
from hodiff.distributed.vectors import reduce_over
from hodiff.optim.finite_numbers import norm_of


class InnerProduct:
    """The Euclidean inner product of vectors on one process."""

    def dot(self, u: Tensor, v: Tensor) -> float:
        """Compute the inner product."""
        return float(u @ v)

    def norm(self, v: Tensor) -> float:
        """Compute the norm in a wide dtype."""
        return norm_of(v)

    def largest(self, *vectors: Tensor) -> float:
        """Compute the largest magnitude of all numbers."""
        found = [v.abs().max() for v in vectors if v.numel()]
        return float(torch.stack(found).max()) if found else 0.0


class InnerProductOfShards(InnerProduct):
    """The Euclidean inner product of vectors whose parts lie on the ranks of a mesh.

    Args:
        mesh: The mesh.
        layouts: Layout of each leaf; replicated numbers count once.
        sizes: Number of local elements of each leaf.
    """

    def __init__(self, mesh: Any, layouts: Sequence[Layout], sizes: Sequence[int]):
        self._mesh = mesh
        # Parts of replicated numbers, which add up to one.
        self._shares = torch.cat([
            torch.full((size,), 1 / layout.copies, dtype=torch.float64, device=mesh.device_type)
            for layout, size in zip(layouts, sizes, strict=True)
        ])

    def dot(self, u: Tensor, v: Tensor) -> float:
        """See `InnerProduct`; ranks add up their parts in float64."""
        return self._reduced(float((u * self._shares.to(u)) @ v), "SUM")

    def norm(self, v: Tensor) -> float:
        """See `InnerProduct`."""
        return self._reduced(norm_of(v * self._shares.sqrt().to(v)) ** 2, "SUM") ** 0.5

    def largest(self, *vectors: Tensor) -> float:
        """See `InnerProduct`."""
        return self._reduced(super().largest(*vectors), "MAX")

    def _reduced(self, number: float, operation: str) -> float:
        own = torch.tensor([number], dtype=torch.float64, device=self._mesh.device_type)
        return float(reduce_over(self._mesh, own, operation))
