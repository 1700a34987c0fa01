"""Rules for piecewise losses, which torch differentiates only once, or without forward mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, Declined, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.losses.reduction import DEPRECATED, REDUCE
from hodiff.functions.logarithms import LogSigmoid
from hodiff.functions.losses.losses import REDUCTIONS, Huber
from hodiff.routes import ROUTES

_first_order = partial(
    register, kind="missing", routes=ROUTES, reason="neither the forward rule nor the second derivative is implemented"
)
# Routes with forward mode as the outermost pass.
_no_forward = partial(
    register, kind="missing", routes=ROUTES[1::2], reason="the derivative of its backward has no forward rule"
)


def _declined(input: Tensor, target: Tensor, reduction: str) -> Declined | None:
    """Return the reason to decline a call, or None."""
    if not input.is_floating_point() or target.is_complex() or reduction not in REDUCTIONS:
        return INVALID
    return None


def _common(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to the dtype in which torch's kernels compute, before they cast to that of the input."""
    dtype = torch.promote_types(input.dtype, target.dtype)
    return input.to(dtype), target.to(dtype)


@_no_forward(F.huber_loss, reference="Huber (1964)")
def _huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Any:
    declined = _declined(input, target, reduction)
    if declined is not None:
        return declined
    if not isinstance(delta, (int, float)) or delta <= 0 or (weight is not None and weight.shape != input.shape):
        return INVALID
    if input.shape != target.shape:
        F.huber_loss(input.detach(), target.detach())  # torch's warning, or error
    x, t = _common(input, target)
    losses = Huber.call(x - t, delta).to(input.dtype)
    return REDUCE[reduction](losses if weight is None else losses * weight)


@_no_forward(F.soft_margin_loss, reference="$-\\log \\sigma(t x)$")
def _soft_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Any:
    declined = _declined(input, target, reduction)
    if declined is not None:
        return declined
    x, t = _common(input, target)
    if size_average is not None or reduce is not None:
        # Only torch knows what these mean. Its backward negates the target, even one of unsigned integers, so pass t.
        return F.soft_margin_loss(input, t, size_average, reduce, reduction)
    return REDUCE[reduction](-LogSigmoid.call(t * x).to(input.dtype))


@_first_order(F.multi_margin_loss, reference="Crammer & Singer (2001), eq. 2")
def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if (
        not input.is_floating_point()
        or target.dtype != torch.long
        or input.dim() > 2
        or 0 in input.shape[-1:]
        or (target.shape != input.shape[:-1] if input.dim() == 2 else target.shape not in ((), (1,)))
        or p not in (1, 2)
        or (weight is not None and weight.shape != (input.shape[-1:] or (1,)))
        or reduction not in REDUCTIONS
    ):
        return INVALID
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    input = input if input.dim() else input.reshape(1)
    classes = input.shape[-1]
    own = target.reshape(*input.shape[:-1], 1)
    excess = margin - input.gather(-1, own) + input
    # A difference that is NaN does not count, as in torch.
    counted = (excess > 0) & (torch.arange(classes, device=input.device) != own)
    excess = torch.where(counted, excess, 0)
    excess = excess if p == 1 else excess * excess
    if weight is not None:
        excess = torch.where(counted, excess * weight.take(own), 0)
    losses = excess.sum(-1) / classes
    # Dynamo fails on a view that changes nothing.
    return REDUCE[reduction](losses if losses.shape == target.shape else losses.reshape(target.shape))


@_first_order(F.multilabel_margin_loss, reference="the definition in torch's manual")
def _multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Any:
    if (
        not input.is_floating_point()
        or target.dtype != torch.long
        or input.dim() > 2
        or not input.numel()
        or target.shape != input.shape
        or reduction not in REDUCTIONS
    ):
        return INVALID
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    input, target = (each if each.dim() else each.reshape(1) for each in (input, target))
    classes = input.shape[-1]
    listed = (target < 0).cumsum(-1) == 0  # a negative label ends the list
    labels = torch.where(listed, target, 0)
    is_label = (listed.unsqueeze(-1) & (labels.unsqueeze(-1) == torch.arange(classes, device=input.device))).any(-2)
    excess = 1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2)
    # A difference that is NaN does not count, as in torch.
    counted = listed.unsqueeze(-1) & ~is_label.unsqueeze(-2) & (excess > 0)
    return REDUCE[reduction](torch.where(counted, excess, 0).sum((-2, -1)) / classes)
