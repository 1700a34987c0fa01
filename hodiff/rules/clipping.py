"""Clipping, with one derivative at its ends in every version of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Later versions of torch take the ends for outside.
_TAKES_ENDS_FOR_INSIDE = torch.__version__ < "2.14"


def clip(x: Tensor, low: Any, high: Any) -> Tensor:
    """As `torch.clamp`; the derivative by x is 1 between the bounds, ends included, and 0 outside."""
    if _TAKES_ENDS_FOR_INSIDE:
        return x.clamp(low, high)
    # The derivative by x is that of x where nothing is clipped, which takes a byte an element to remember.
    clipped = x.detach().clamp(low, high)
    return torch.where(x.detach() == clipped.detach(), x, clipped)
