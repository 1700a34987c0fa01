"""Rules for activations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.registry import Correction, correct


def _relu(input: Tensor, inplace: bool = False) -> Tensor:
    del inplace
    # The same values, in one operator that torch differentiates in its first argument alone: the mask is a constant.
    return torch.ops.aten.threshold_backward.default(input, input.detach(), 0)


def _covered(input: Any, inplace: bool = False) -> bool:
    return isinstance(input, Tensor) and input.is_floating_point() and not inplace


correct(
    (torch.relu, Tensor.relu, F.relu),
    Correction(
        "torch.nn.functional.relu",
        _relu,
        "slow",
        "the second derivative is zero, yet computed and added",
        covers=_covered,
    ),
)
