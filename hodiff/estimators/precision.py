"""Sums in high precision, which cost little beside products."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(block: Tensor) -> Tensor:
    """Convert to float64, for sums and factorizations that cost little beside products; on MPS keep the dtype."""
    return block if block.device.type == "mps" else block.to(torch.float64)


def norms_of(block: Tensor) -> Tensor:
    """Compute the norms of columns in high precision, on the operator's device."""
    return torch.linalg.vector_norm(block, dim=0, dtype=block.dtype if block.device.type == "mps" else torch.float64)
