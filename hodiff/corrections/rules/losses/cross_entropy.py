"""Rules for cross-entropy, also after a linear layer (`linear_cross_entropy`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hodiff import functions
from hodiff.corrections.mechanism.declining import UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value
from hodiff.corrections.rules.elementwise.softmax import log_softmax, rounds_to_one
from hodiff.corrections.rules.losses.class_weights import class_dimension, weighted_cross_entropy
from hodiff.corrections.rules.losses.reduction import DEPRECATED
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import carry_derivatives


def _has_lean_rule(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    # Only torch knows what the deprecated arguments mean, and only class indices have the lean rule.
    del ignore_index, reduction
    return (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and input.dim() == 2
        and target.dim() == 1
        and weight is None
        and size_average is None
        and reduce is None
        and label_smoothing == 0.0
        and input.dtype in (torch.float32, torch.float64)
    )


def _moves_weights(input: Any, target: Any, weight: Any = None, *_: Any, **__: Any) -> bool:
    """Whether a derivative passes through the weights, which torch's forward mode treats as constants."""
    del input, target
    return isinstance(weight, Tensor) and not is_compiling() and carry_derivatives([weight])


def _loses_digits(input: Any, target: Any, weight: Any = None, *_: Any, **__: Any) -> bool:
    """Whether torch's derivatives are wrong, or computed from a probability that rounds to 1."""
    return (weight is not None and _moves_weights(input, target, weight)) or (
        isinstance(input, Tensor) and input.numel() < _MANY and rounds_to_one(input, class_dimension(input))
    )


def _logarithms(input: Tensor) -> Tensor | None:
    """Return log-probabilities if torch's derivatives lose digits and the logits are few; None otherwise."""
    return log_softmax(input, class_dimension(input)) if input.numel() < _MANY else None


# Measured: one product takes twice torch's time for (256, 10), a fifth for (4096, 1000).
_MANY = 2**17


@register(
    F.cross_entropy,
    kind="slow",
    reason="the double backward takes nine passes over the logits instead of three; weights are constants in forward "
    "mode; derivatives are computed from a probability that rounds to 1",
    covers=lambda *args, **kwargs: _has_lean_rule(*args, **kwargs) or _loses_digits(*args, **kwargs),
    mends=_loses_digits,
    least_elements=_MANY,
    devices=("cpu",),
)
def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    logs = _logarithms(input)
    if logs is None and not _moves_weights(input, target, weight):
        # The rule was chosen because it is faster.
        return functions.cross_entropy(
            input, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    # torch's function gives the value, and raises its own errors.
    constant = None if weight is None else weight.detach()
    value = F.cross_entropy(
        input.detach(), target.detach(), constant, None, ignore_index, None, reduction, label_smoothing
    )
    classes = class_dimension(input)
    logs = input.log_softmax(classes) if logs is None else logs
    along = logs.new_ones(logs.shape[classes]) if weight is None else weight
    loss = weighted_cross_entropy(logs, target, along, ignore_index, reduction, label_smoothing)
    return with_value(loss, value) if isinstance(loss, Tensor) else loss


# New in torch 2.13.
if hasattr(F, "linear_cross_entropy"):

    @register(
        F.linear_cross_entropy,
        kind="wrong",
        routes=ROUTES,
        reason="the chunked kernel treats its gradient as a constant",
        reference="Wijmans et al. (2025), section 4; torch's own function on all logits if the kernel does not "
        "support the call",
    )
    def _linear_cross_entropy(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
    ) -> Any:
        if options is None:
            return UNNEEDED
        ignored = -100 if ignore_index is None else ignore_index
        given: dict[str, Any] = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction}
        if not _is_chunked(input, linear_weight, target, linear_bias, weight, reduction, label_smoothing):
            return F.linear_cross_entropy(
                input, linear_weight, target, **given, ignore_index=ignore_index, label_smoothing=label_smoothing
            )
        if weight is not None and carry_derivatives([weight]):
            logits = F.linear(input, linear_weight, linear_bias)
            return weighted_cross_entropy(logits.log_softmax(-1), target, weight, ignored, reduction, 0.0)
        return functions.linear_cross_entropy(input, linear_weight, target, **given, ignore_index=ignored)


def _is_chunked(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> bool:
    """Whether torch's kernel and hodiff's function both support the call; torch raises the errors."""
    classes = linear_weight.shape[:1]
    tensors = [each for each in (input, linear_weight, linear_bias) if each is not None]
    return (
        input.dim() in (1, 2)
        and linear_weight.dim() == 2
        and input.shape[-1] == linear_weight.shape[-1]
        and classes[0] > 0
        and target.dtype == torch.int64
        and target.shape == input.shape[:-1]
        and all(each.is_floating_point() and each.dtype == input.dtype for each in tensors)
        and all(each is None or each.shape == classes for each in (linear_bias, weight))
        and reduction in {"mean", "sum", "none"}
        and label_smoothing == 0.0
    )
