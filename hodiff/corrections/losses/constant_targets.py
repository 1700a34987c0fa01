"""Rules for losses whose forward rule fails where the target is a constant.

Torch gives such a target a tangent without memory, into which its own formulas then write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED, Declined, unable
from hodiff.corrections.registry import register
from hodiff.functions import log_sigmoid
from hodiff.torch_internals.forward_mode import in_forward_mode
from hodiff.torch_internals.transforms import in_transform

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda each: each, "mean": torch.mean, "sum": torch.sum}


def _declined(input: Tensor, target: Tensor, size_average: Any, reduce: Any, reduction: str) -> Declined | None:
    """What the rules do not know, or are not needed for: without a tangent torch is right."""
    if not (in_transform() or in_forward_mode()):
        return UNNEEDED
    if not (input.is_floating_point() and target.is_floating_point()) or reduction not in _REDUCE:
        return INVALID
    if size_average is not None or reduce is not None:
        return unable("size_average and reduce are deprecated, and only torch remembers what they mean")
    return None if input.shape == target.shape else unable("the shapes of input and target differ")


@register(
    F.mse_loss,
    kind="missing",
    routes=("forward-over-reverse",),
    reason="raises where the target has no tangent",
    reference="elementary operators",
)
def _mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Any:
    if weight is not None:
        return UNNEEDED  # torch has operators of its own for that
    declined = _declined(input, target, size_average, reduce, reduction)
    if declined is not None:
        return declined
    return _REDUCE[reduction]((input - target).square())


@register(
    F.binary_cross_entropy_with_logits,
    kind="missing",
    routes=("forward-over-forward",),
    reason="raises where the target has no tangent",
    reference="(1 - t) x - (1 + (p - 1) t) log σ(x)",
)
def _binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Any:
    declined = _declined(input, target, size_average, reduce, reduction)
    if declined is not None:
        return declined
    hits = log_sigmoid(input) if pos_weight is None else (1 + (pos_weight - 1) * target) * log_sigmoid(input)
    loss = (1 - target) * input - hits
    return _REDUCE[reduction](loss if weight is None else loss * weight)
