"""What `torch.autocast` does to the operators it lowers, for Functions that stand for one of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_like_torch(*arguments: Any) -> tuple[Any, ...]:
    """Lower tensors as `torch.autocast` lowers those of a matrix product or convolution; float64 stays, as in torch."""
    # A Function calls operators below autocast in forward and again in backward, where autocast is off; so that both
    # see the same dtype, the cast stands in front of the Function and is differentiated with it. float64 stays.
    return tuple(_lowered(each) if isinstance(each, Tensor) else each for each in arguments)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Operators as they are: a formula has its precision, which autocast would lower, and kernels have it anyway."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _lowered(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
