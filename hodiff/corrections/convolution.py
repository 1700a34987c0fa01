"""Rules for convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff import functions
from hodiff.corrections.registry import Correction, correct


def _covered(input: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> bool:
    tensors = [each for each in (input, weight, bias) if each is not None]
    return (
        all(isinstance(each, Tensor) and each.is_floating_point() for each in tensors)
        and not torch.is_autocast_enabled(input.device.type)
        and any(each.requires_grad for each in tensors)
    )


def _enter(name: str, torchs: Callable[..., Any], rule: Callable[..., Tensor]) -> None:
    reason = "the double backward computes the gradient of constant data"
    # Measured: three nodes in Python take half a millisecond longer than torch's one, whatever the size.
    entry = Correction(f"torch.nn.functional.{name}", rule, "slow", reason, covers=_covered, least_elements=2**16)
    correct((torchs,), entry)


_enter("conv1d", F.conv1d, functions.conv1d)
_enter("conv2d", F.conv2d, functions.conv2d)
