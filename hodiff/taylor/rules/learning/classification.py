"""Rules for classification losses, with labels or distributions as targets."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.registry import rule
from hodiff.taylor.rules.learning.losses import reduced, reduction_of
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


@rule("nn.nll_loss")
def nll_loss(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Negative log-likelihood: entries picked by labels, with class weights."""
    reduction = reduction_of({"size_average": size_average, "reduce": reduce, "reduction": reduction})
    single = value_of(frame, input).ndim == 1
    logs = input.unsqueeze(0) if single else input
    labels = target.unsqueeze(0) if single else target
    counted = labels != ignore_index
    labels = torch.where(counted, labels, 0)
    losses = -torch.gather(logs, 1, labels.unsqueeze(1)).squeeze(1)
    shares = torch.ones_like(value_of(frame, losses)) if weight is None else weight[labels]
    shares = shares * counted
    losses = losses * shares
    losses = losses.squeeze(0) if single else losses
    return reduced(losses, reduction, shares.sum())


@rule("nn.cross_entropy")
def cross_entropy(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Cross-entropy from log_softmax, with entries picked by labels or the mean under a distribution."""
    reduction = reduction_of({"size_average": size_average, "reduce": reduce, "reduction": reduction})
    classes = 0 if value_of(frame, input).ndim == 1 else 1
    logs = torch.log_softmax(input, classes)
    count = value_of(frame, input).shape[classes]
    shape = [1] * value_of(frame, input).ndim
    shape[classes] = -1
    weights = None if weight is None else weight.reshape(shape)
    labels = value_of(frame, target)
    if labels.is_floating_point():
        smooth = target * (1 - label_smoothing) + label_smoothing / count
        losses = -(smooth * (logs if weights is None else weights * logs)).sum(classes)
        rows = value_of(frame, losses).numel()
        return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / rows
    hard = functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    if label_smoothing == 0:
        return hard
    counted = labels != ignore_index
    each = -(logs if weights is None else weights * logs).sum(classes) * counted
    if reduction == "mean":
        picked = torch.where(counted, labels, 0)
        total = counted.sum() if weight is None else (weight[picked] * counted).sum()
        each = each.sum() / total
    elif reduction == "sum":
        each = each.sum()
    return (1 - label_smoothing) * hard + label_smoothing / count * each
