"""Sums in high precision, where they cost little beside products."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(block: Tensor) -> Tensor:
    """In float64, where sums and factorizations cost little beside products; in its own dtype where MPS has none."""
    return block if block.device.type == "mps" else block.to(torch.float64)


def norms_of(block: Tensor) -> Tensor:
    """Norms of columns, in high precision on the operator's device."""
    return torch.linalg.vector_norm(block, dim=0, dtype=block.dtype if block.device.type == "mps" else torch.float64)
