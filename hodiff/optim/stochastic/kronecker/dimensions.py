"""Dimensions of a parameter: their choice, second moments along them, and products with a factor for each.

A factor is a matrix (n, n), a diagonal (n,), or None for the identity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Factors = Sequence[Tensor | None]


def working_shape(shape: Sequence[int], limit: int, merge: bool) -> tuple[int, ...]:
    """Drop dimensions of size 1, and merge those behind the first from the last on, up to the limit."""
    first, *rest = [size for size in shape if size != 1] or [1]
    if not merge:
        return first, *rest
    merged: list[int] = []
    for size in reversed(rest):
        if merged and merged[0] * size <= limit:
            merged[0] *= size
        else:
            merged.insert(0, size)
    return first, *merged


def second_moment(tensor: Tensor, dim: int, diagonal: bool) -> Tensor:
    """Compute the sum of $v v^T$ over all vectors v along a dimension, or its diagonal."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
    return rows.square().sum(1) if diagonal else rows @ rows.mT


def multiplied(tensor: Tensor, factors: Factors, *, transposed: bool = False) -> Tensor:
    """Multiply a tensor along each dimension by a factor or its transpose."""
    for factor in factors:
        # The first dimension moves to the end, so after a round every dimension is multiplied and the order is
        # restored.
        if factor is None:
            tensor = tensor.movedim(0, -1)
        elif factor.dim() == 1:
            tensor = tensor.movedim(0, -1) * factor
        else:
            tensor = torch.tensordot(tensor, factor, dims=([0], [0 if transposed else 1]))
    return tensor
