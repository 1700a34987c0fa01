"""Whether a call is to be differentiated at all: where it is not, torch's fused kernels serve best."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_differentiated(tensors: Iterable[Any]) -> bool:
    """Whether a derivative by the tensors may be asked for: a graph is recorded, or a transform is at work.

    Args:
        tensors: Arguments of the call; what is no tensor is passed over.

    Returns:
        False only where it certainly is not.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in tensors)
