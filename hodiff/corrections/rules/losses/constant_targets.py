"""Rules for losses whose forward rule fails where the target is a constant.

Torch gives such a target a tangent without memory, into which its own formulas then write.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value_of
from hodiff.corrections.rules.elementwise.tails import saturates
from hodiff.corrections.rules.losses.reduction import DEPRECATED, REDUCE
from hodiff.functions import log_sigmoid
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform


def _declined(
    input: Tensor, target: Tensor, size_average: Any, reduce: Any, reduction: str, needed: bool = False
) -> Declined | None:
    """Return the reason to decline a call, or None; without a tangent torch is right."""
    if not (needed or in_transform() or in_forward_mode()):
        return UNNEEDED
    if input.is_complex() or target.is_complex() or reduction not in REDUCE:
        return INVALID
    return None if size_average is None and reduce is None else unable(DEPRECATED)


def _in_one_dtype(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a tensor of integers or booleans to the dtype of the other tensor."""
    if not input.is_floating_point():
        return input.to(target.dtype), target
    return input, target if target.is_floating_point() else target.to(input.dtype)


@register(
    F.mse_loss,
    kind="missing",
    routes=ROUTES[1:],
    reason="raises an error if the target has no tangent or an integer dtype",
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
        return UNNEEDED  # torch has other operators for weighted losses
    declined = _declined(input, target, size_average, reduce, reduction)
    if declined is not None:
        return declined
    if not (input.is_floating_point() or target.is_floating_point()):
        return INVALID
    if input.shape != target.shape:
        F.mse_loss(input.detach(), target.detach())  # torch's warning, or error
    input, target = _in_one_dtype(input, target)
    return REDUCE[reduction]((input - target).square())


@register(
    F.smooth_l1_loss,
    kind="missing",
    routes=ROUTES[1:],
    reason="the forward rule raises an error if the target has an integer dtype",
    reference="the same function, with the target in the dtype of the input",
)
def _smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Any:
    if input.is_floating_point() == target.is_floating_point() or input.is_complex() or target.is_complex():
        return UNNEEDED
    return F.smooth_l1_loss(*_in_one_dtype(input, target), size_average, reduce, reduction, beta)


@register(
    F.binary_cross_entropy_with_logits,
    kind="missing",
    routes=("forward-over-forward",),
    reason="raises an error if the target has no tangent; derivatives lose digits in the tails",
    reference="-p t log σ(x) - (1 - t) log σ(-x)",
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
    if not (input.is_floating_point() and target.is_floating_point()):
        return INVALID
    if input.shape != target.shape or input.dtype != target.dtype:
        return unable("the shapes or dtypes of input and target differ")
    declined = _declined(input, target, size_average, reduce, reduction, needed=saturates(input))
    if declined is not None:
        return declined
    hits = target * log_sigmoid(input)
    loss = (target - 1) * log_sigmoid(-input) - (hits if pos_weight is None else pos_weight * hits)
    loss = REDUCE[reduction](loss if weight is None else loss * weight)
    # For infinite targets, torch's formula gives other values.
    options = {"weight": weight, "reduction": reduction, "pos_weight": pos_weight}
    return with_value_of(loss, F.binary_cross_entropy_with_logits, input, target, **options)
