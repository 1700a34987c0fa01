"""Blocks of vectors turned from columns into rows."""

from __future__ import annotations

from torch import Tensor

from hodiff.kernels import fused


def turned(block: Tensor) -> Tensor:
    """The transpose (k, n) of a block (n, k), contiguous."""
    rows = block.t()
    if rows.is_contiguous():
        return rows
    return fused.turned(block) if block.numel() and fused.takes(block) else rows.contiguous()
