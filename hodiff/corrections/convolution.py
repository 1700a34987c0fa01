"""Rules for convolutions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff import functions
from hodiff.corrections.registry import register


def _is_recorded(input: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> bool:
    tensors = [each for each in (input, weight, bias) if each is not None]
    return (
        all(isinstance(each, Tensor) and each.is_floating_point() for each in tensors)
        and not torch.is_autocast_enabled(input.device.type)
        and any(each.requires_grad for each in tensors)
    )


_lean = partial(
    register,
    kind="slow",
    reason="the double backward computes the gradient of constant data",
    covers=_is_recorded,
    # Measured: three nodes in Python take half a millisecond longer than torch's one, whatever the size.
    least_elements=2**16,
)

_lean(F.conv1d, name="torch.nn.functional.conv1d")(functions.conv1d)
_lean(F.conv2d, name="torch.nn.functional.conv2d")(functions.conv2d)
