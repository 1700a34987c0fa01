r"""Rules for losses by whose weights one differentiates; torch takes them for constants in forward mode, in silence.

$$ \ell = -\frac{\sum_n w_{y_n} \log p_{n, y_n}}{\sum_n w_{y_n}} $$
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.losses.reduction import DEPRECATED, REDUCE
from hodiff.corrections.registry import register
from hodiff.corrections.values import with_value_of
from hodiff.routes import FORWARD_INSIDE
from hodiff.torch_internals.autograd.differentiation import carry_derivatives

_constant_weights = partial(
    register, routes=FORWARD_INSIDE, reason="weights are constants to forward mode", reference="elementary operators"
)


def weighted_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor, ignore_index: int, reduction: str, smoothing: float
) -> Any:
    """Cross-entropy by elementary operators, of class indices or of probabilities."""
    classes = 1 if logits.dim() > 1 else 0
    log_probs = logits.log_softmax(classes)
    if not target.is_floating_point():
        return _of_indices(log_probs, target, weight, ignore_index, reduction, smoothing)
    if weight.shape != (logits.shape[classes],) or target.shape != logits.shape or reduction not in REDUCE:
        return INVALID
    smooth = target * (1 - smoothing) + smoothing / logits.shape[classes]
    return REDUCE[reduction](-(_along(weight, log_probs, classes) * smooth * log_probs).sum(classes))


def _of_indices(
    log_probs: Tensor, target: Tensor, weight: Tensor, ignore_index: int, reduction: str, smoothing: float = 0.0
) -> Any:
    classes = 1 if log_probs.dim() > 1 else 0
    count = log_probs.shape[classes]
    if weight.shape != (count,) or target.dim() != log_probs.dim() - 1 or reduction not in REDUCE:
        return INVALID
    counts = target != ignore_index
    labels = torch.where(counts, target, 0)
    weights = torch.where(counts, weight[labels], 0)
    loss = -weights * log_probs.gather(classes, labels.unsqueeze(classes)).squeeze(classes)
    if smoothing:
        everywhere = -(_along(weight, log_probs, classes) * log_probs).sum(classes)
        loss = (1 - smoothing) * loss + smoothing / count * torch.where(counts, everywhere, 0)
    return loss.sum() / weights.sum() if reduction == "mean" else REDUCE[reduction](loss)


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    """One weight for each index of a dimension."""
    return weight.reshape([-1 if each == dim else 1 for each in range(x.dim())])


@_constant_weights(F.nll_loss)
def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if weight is None or torch.compiler.is_compiling() or not carry_derivatives([weight]):
        return UNNEEDED
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    loss = _of_indices(input, target, weight, ignore_index, reduction)
    if not isinstance(loss, Tensor):
        return loss
    return with_value_of(loss, F.nll_loss, input, target, weight, ignore_index=ignore_index, reduction=reduction)


@_constant_weights(F.binary_cross_entropy)
def _binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if weight is None or torch.compiler.is_compiling() or not carry_derivatives([weight]):
        return UNNEEDED
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    if reduction not in REDUCE:
        return INVALID
    return REDUCE[reduction](F.binary_cross_entropy(input, target, reduction="none") * weight)
