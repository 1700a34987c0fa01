"""Transposes of blocks of vectors, from columns into rows."""

from __future__ import annotations

from torch import Tensor

from hodiff.kernels import fused


def turned(block: Tensor) -> Tensor:
    """Return the contiguous transpose (k, n) of a block (n, k)."""
    rows = block.t()
    if rows.is_contiguous():
        return rows
    return fused.turned(block) if block.numel() and fused.takes(block) else rows.contiguous()
