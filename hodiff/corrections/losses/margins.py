"""Rules for piecewise losses, whose derivatives torch has to the first order or without forward mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.registry import register
from hodiff.functions.logarithms import LogSigmoid
from hodiff.functions.losses.losses import REDUCTIONS, Huber
from hodiff.routes import ROUTES

_first_order = partial(
    register, kind="missing", routes=ROUTES, reason="neither a forward rule nor a second derivative is implemented"
)
# Over a forward pass, the outermost one included.
_no_forward = partial(
    register, kind="missing", routes=ROUTES[1::2], reason="the derivative of its backward has no forward rule"
)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return {"mean": Tensor.mean, "sum": Tensor.sum}[reduction](losses) if reduction != "none" else losses


def _pair(input: Any, target: Any, reduction: Any) -> bool:
    return (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and input.is_floating_point()
        and input.dtype == target.dtype
        and reduction in REDUCTIONS
    )


def _huber_covers(
    input: Any, target: Any, reduction: Any = "mean", delta: Any = 1.0, weight: Tensor | None = None
) -> bool:
    return (
        _pair(input, target, reduction)
        and isinstance(delta, (int, float))
        and delta > 0
        and (weight is None or weight.shape == input.shape)
    )


@_no_forward(F.huber_loss, covers=_huber_covers, reference="Huber (1964)")
def _huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    if input.shape != target.shape:
        F.huber_loss(input.detach(), target.detach())  # torch's warning, or error
    losses = Huber.call(input - target, delta)
    return _reduced(losses if weight is None else losses * weight, reduction)


def _soft_margin_covers(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean"
) -> bool:
    return _pair(input, target, reduction) and size_average is None and reduce is None


@_no_forward(F.soft_margin_loss, covers=_soft_margin_covers, reference="$-\\log \\sigma(t x)$")
def _soft_margin_loss(
    input: Tensor, target: Tensor, size_average: None = None, reduce: None = None, reduction: str = "mean"
) -> Tensor:
    del size_average, reduce
    return _reduced(-LogSigmoid.call(target * input), reduction)


def _multi_margin_covers(
    input: Any,
    target: Any,
    p: Any = 1,
    margin: Any = 1.0,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> bool:
    del margin
    return (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and input.is_floating_point()
        and target.dtype == torch.long
        and input.dim() <= 2
        and 0 not in input.shape[-1:]
        and (target.shape == input.shape[:-1] if input.dim() == 2 else target.shape in ((), (1,)))
        and p in (1, 2)
        and (weight is None or weight.shape == (input.shape[-1:] or (1,)))
        and size_average is None
        and reduce is None
        and reduction in REDUCTIONS
    )


@_first_order(F.multi_margin_loss, covers=_multi_margin_covers, reference="Crammer & Singer (2001), eq. 2")
def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    del size_average, reduce
    input = input if input.dim() else input.reshape(1)
    classes = input.shape[-1]
    own = target.reshape(*input.shape[:-1], 1)
    excess = torch.relu(margin - input.gather(-1, own) + input)
    excess = torch.where(torch.arange(classes, device=input.device) == own, 0, excess if p == 1 else excess * excess)
    if weight is not None:
        excess = excess * weight.take(own)
    losses = excess.sum(-1) / classes
    # Dynamo fails on a view that changes nothing.
    return _reduced(losses if losses.shape == target.shape else losses.reshape(target.shape), reduction)


def _multilabel_margin_covers(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean"
) -> bool:
    return (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and input.is_floating_point()
        and target.dtype == torch.long
        and input.dim() <= 2
        and input.numel() > 0
        and target.shape == input.shape
        and size_average is None
        and reduce is None
        and reduction in REDUCTIONS
    )


@_first_order(F.multilabel_margin_loss, covers=_multilabel_margin_covers, reference="the definition in torch's manual")
def _multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: None = None, reduce: None = None, reduction: str = "mean"
) -> Tensor:
    del size_average, reduce
    input, target = (each if each.dim() else each.reshape(1) for each in (input, target))
    classes = input.shape[-1]
    listed = (target < 0).cumsum(-1) == 0  # a negative label ends the list
    labels = torch.where(listed, target, 0)
    is_label = (listed.unsqueeze(-1) & (labels.unsqueeze(-1) == torch.arange(classes, device=input.device))).any(-2)
    excess = torch.relu(1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2))
    counted = listed.unsqueeze(-1) & ~is_label.unsqueeze(-2)
    return _reduced(torch.where(counted, excess, 0).sum((-2, -1)) / classes, reduction)
