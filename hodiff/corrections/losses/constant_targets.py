"""Rules for losses whose forward rule fails where the target is a constant.

Torch gives such a target a tangent without memory, into which its own formulas then write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.registry import register
from hodiff.functions import log_sigmoid
from hodiff.torch_internals.forward_mode import in_forward_mode
from hodiff.torch_internals.transforms import in_transform

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda each: each, "mean": torch.mean, "sum": torch.sum}


def _forward_mode(input: Any, target: Any, **options: Any) -> bool:
    """Whether a tangent may be at work, and all arguments are those that the rules know."""
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return False
    if not (in_transform() or in_forward_mode()):
        return False
    return (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and input.shape == target.shape
        and input.is_floating_point()
        and target.is_floating_point()
        and options.get("reduction", "mean") in _REDUCE
    )


def _squares(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> bool:
    return weight is None and _forward_mode(
        input, target, size_average=size_average, reduce=reduce, reduction=reduction
    )


@register(
    F.mse_loss,
    kind="missing",
    routes=("forward-over-reverse",),
    reason="raises where the target has no tangent",
    reference="elementary operators",
    covers=_squares,
)
def _mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    weight: None = None,
) -> Tensor:
    del size_average, reduce, weight
    return _REDUCE[reduction]((input - target).square())


def _logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> bool:
    del weight, pos_weight
    return _forward_mode(input, target, size_average=size_average, reduce=reduce, reduction=reduction)


@register(
    F.binary_cross_entropy_with_logits,
    kind="missing",
    routes=("forward-over-forward",),
    reason="raises where the target has no tangent",
    reference="(1 - t) x - (1 + (p - 1) t) log σ(x)",
    covers=_logits,
)
def _binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    del size_average, reduce
    hits = log_sigmoid(input) if pos_weight is None else (1 + (pos_weight - 1) * target) * log_sigmoid(input)
    loss = (1 - target) * input - hits
    return _REDUCE[reduction](loss if weight is None else loss * weight)
