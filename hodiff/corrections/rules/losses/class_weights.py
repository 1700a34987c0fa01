r"""Rules for losses with differentiable weights, which torch's forward mode silently treats as constants.

$$ \ell = -\frac{\sum_n w_{y_n} \log p_{n, y_n}}{\sum_n w_{y_n}} $$
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value, with_value_of
from hodiff.corrections.rules.losses.reduction import DEPRECATED, REDUCE
from hodiff.routes import FORWARD_INSIDE
from hodiff.torch_internals.autograd.differentiation import carry_derivatives, may_be_differentiated

# torch's divisor at a probability of 0 or 1.
_LEAST = 1e-12

_constant_weights = partial(
    register, routes=FORWARD_INSIDE, reason="weights are constants in forward mode", reference="elementary operators"
)


def weighted_cross_entropy(
    log_probs: Tensor, target: Tensor, weight: Tensor, ignore_index: int, reduction: str, smoothing: float
) -> Any:
    """Cross-entropy by elementary operators, given log-probabilities and class indices or probabilities."""
    classes = class_dimension(log_probs)
    if not target.is_floating_point():
        return _of_indices(log_probs, target, weight, ignore_index, reduction, smoothing)
    if weight.shape != (log_probs.shape[classes],) or target.shape != log_probs.shape or reduction not in REDUCE:
        return INVALID
    smooth = target * (1 - smoothing) + smoothing / log_probs.shape[classes]
    return REDUCE[reduction](-(_along(weight, log_probs, classes) * smooth * log_probs).sum(classes))


def _of_indices(
    log_probs: Tensor, target: Tensor, weight: Tensor, ignore_index: int, reduction: str, smoothing: float = 0.0
) -> Any:
    classes = class_dimension(log_probs)
    count = log_probs.shape[classes]
    if weight.shape != (count,) or target.dim() != log_probs.dim() - 1 or reduction not in REDUCE:
        return INVALID
    counts = target != ignore_index
    labels = torch.where(counts, target, 0).long()
    # torch.vmap does not support indexing by a single number of each sample.
    picked = weight.index_select(0, labels.reshape(-1)).reshape(labels.shape)
    weights = torch.where(counts, picked, 0)
    loss = -weights * log_probs.gather(classes, labels.unsqueeze(classes)).squeeze(classes)
    if smoothing:
        everywhere = -(_along(weight, log_probs, classes) * log_probs).sum(classes)
        loss = (1 - smoothing) * loss + smoothing / count * torch.where(counts, everywhere, 0)
    return loss.sum() / weights.sum() if reduction == "mean" else REDUCE[reduction](loss)


def class_dimension(logits: Tensor) -> int:
    """Return the dimension of the classes."""
    return 1 if logits.dim() > 1 else 0


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    """Reshape weights to broadcast along a dimension of x."""
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


@register(
    F.binary_cross_entropy,
    routes=FORWARD_INSIDE,
    reason="weights are constants in forward mode; second derivatives are clamped and lose digits",
    reference="$-t \\log x - (1 - t) \\log(1 - x)$; torch's bounds if a probability is 0 or 1",
)
def _binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if torch.compiler.is_compiling() or not may_be_differentiated((input, target, weight)):
        return UNNEEDED
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED) if weight is not None and carry_derivatives([weight]) else UNNEEDED
    if reduction not in REDUCE or input.shape != target.shape or input.dtype != target.dtype:
        return INVALID
    loss = -(target * _bounded_logarithm(input) + (1 - target) * _bounded_logarithm(1 - input))
    loss = with_value(loss, F.binary_cross_entropy(input.detach(), target.detach(), reduction="none"))
    return REDUCE[reduction](loss if weight is None else loss * weight)


def _bounded_logarithm(p: Tensor) -> Tensor:
    """Logarithm of a probability, with torch's slope at 0."""
    return torch.where(p.detach() == 0, p + _LEAST, p).log()
