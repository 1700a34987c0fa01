"""The rule for reversed subtraction of a multiple, of which torch's tangent of a tangent ends the process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.torch_internals.differentiation import may_be_differentiated


@register(
    torch.rsub,
    kind="missing",
    routes=("forward-over-forward",),
    reason="with alpha the process ends, where anything watches what torch dispatches",
    reference="other - alpha input",
)
def _rsub(input: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    if alpha == 1 or not may_be_differentiated((input, other)):
        return UNNEEDED
    return other - alpha * input
