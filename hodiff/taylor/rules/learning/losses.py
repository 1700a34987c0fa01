"""Rules for losses, listed in `LOSSES`: elementwise ones, and classification by labels or distributions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import value_of
from hodiff.taylor.registry import enter
from hodiff.taylor.rules.arithmetic import with_value
from hodiff.taylor.series import Frame

REDUCTIONS = ("none", "mean", "sum")


def reduced(losses: Any, reduction: str, divisor: Any) -> Any:
    """Reduce losses to their mean or sum, or not at all; a weighted mean has its own divisor."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (losses.numel() if divisor is None else divisor)


def reduction_of(options: dict[str, Any]) -> str:
    """Return the reduction, which the deprecated `size_average` and `reduce` may give."""
    average, reduce, reduction = (options.pop(name, None) for name in ("size_average", "reduce", "reduction"))
    if average is None and reduce is None:
        return str(reduction)
    return "none" if reduce is False else "sum" if average is False else "mean"


def _weighted(losses: Any, weight: Any) -> Any:
    """Weighted losses, whose mean divides by the sum of weights."""
    return losses if weight is None else (weight * losses, weight.expand(losses.shape).sum())


def _scaled(losses: Any, weight: Any) -> Any:
    """Weighted losses, whose mean divides by their number."""
    return losses if weight is None else weight * losses


def _mse(frame: Frame, input: Any, target: Any, weight: Any) -> Any:
    error = input - target
    return _weighted(error * error, weight)


def _l1(frame: Frame, input: Any, target: Any, weight: Any) -> Any:
    return _weighted(torch.abs(input - target), weight)


def _smooth_l1(frame: Frame, input: Any, target: Any, beta: float) -> Any:
    """Parabola below beta, and a line above."""
    error = input - target
    size = torch.abs(error)
    if beta == 0:
        return size
    return torch.where(value_of(frame, size) < beta, error * error / (2 * beta), size - beta / 2)


def _huber(frame: Frame, input: Any, target: Any, delta: float, weight: Any) -> Any:
    """Parabola up to delta, and a line above."""
    error = input - target
    size = torch.abs(error)
    near = value_of(frame, size) <= delta
    return _scaled(torch.where(near, error * error / 2, delta * (size - delta / 2)), weight)


def _bce(frame: Frame, input: Any, target: Any, weight: Any) -> Any:
    """Compute the loss of probabilities, with torch's value (-100) and slope (1e12) for the logarithm of 0."""
    high, low = (
        with_value(frame, torch.clamp(torch.log(value_of(frame, p)), min=-100), _bounded_logarithm(frame, p))
        for p in (input, 1 - input)
    )
    return _scaled(-(target * high + (1 - target) * low), weight)


def _bounded_logarithm(frame: Frame, p: Any) -> Any:
    return torch.log(p + torch.where(value_of(frame, p) == 0, 1e-12, 0.0))


def _bce_with_logits(frame: Frame, input: Any, target: Any, weight: Any, pos_weight: Any) -> Any:
    """Binary cross-entropy of logits, by softplus."""
    high, low = -functional.logsigmoid(input), -functional.logsigmoid(-input)
    return _scaled((1 - target) * low + target * _scaled(high, pos_weight), weight)


def _soft_margin(frame: Frame, input: Any, target: Any) -> Any:
    return -functional.logsigmoid(target * input)


def _kl_div(frame: Frame, input: Any, target: Any, log_target: bool) -> Any:
    """Terms target (log(target) - input) of the divergence."""
    if log_target:
        return torch.exp(target) * (target - input)
    return torch.xlogy(target, target) - target * input


def _poisson_nll(frame: Frame, input: Any, target: Any, log_input: bool, full: bool, eps: float) -> Any:
    """Poisson loss; `full` adds Stirling's formula for the factorial of targets above 1."""
    losses = torch.exp(input) - target * input if log_input else input - target * torch.log(input + eps)
    if not full:
        return losses
    many = value_of(frame, target) > 1
    safe = torch.where(many, target, 1.0)
    return losses + torch.where(many, safe * torch.log(safe) - safe + torch.log(2 * math.pi * safe) / 2, 0.0)


def _gaussian_nll(frame: Frame, input: Any, target: Any, var: Any, full: bool, eps: float) -> Any:
    """Gaussian loss; the variance is at least eps, and the bound does not affect derivatives."""
    x = value_of(frame, input)
    if isinstance(var, float):
        var = var * torch.ones_like(x)
    elif var.ndim < x.ndim and x.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    bounded: Any = torch.where(value_of(frame, var) < eps, torch.full((), eps, dtype=var.dtype, device=var.device), var)
    # torch differentiates as if there were no bound.
    if isinstance(var, Jet):
        bounded = new_jet(frame, [value_of(frame, bounded), *var.coefficients[1:]])
    error = input - target
    losses = (torch.log(bounded) + error * error / bounded) / 2
    return losses + math.log(2 * math.pi) / 2 if full else losses


def _nll(frame: Frame, input: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    """Negative log-likelihood: entries picked by labels, with class weights."""
    single = value_of(frame, input).ndim == 1
    logs = input.unsqueeze(0) if single else input
    labels = target.unsqueeze(0) if single else target
    counted = labels != ignore_index
    labels = torch.where(counted, labels, 0)
    losses = -torch.gather(logs, 1, labels.unsqueeze(1)).squeeze(1)
    shares = torch.ones_like(value_of(frame, losses)) if weight is None else weight[labels]
    shares = shares * counted
    losses = losses * shares
    return losses.squeeze(0) if single else losses, shares.sum()


def _cross_entropy(
    frame: Frame, input: Any, target: Any, weight: Any, ignore_index: int, label_smoothing: float
) -> Any:
    """Cross-entropy from log_softmax, with entries picked by labels or the mean under a distribution."""
    classes = 0 if value_of(frame, input).ndim == 1 else 1
    logs = torch.log_softmax(input, classes)
    count = value_of(frame, input).shape[classes]
    shape = [1] * value_of(frame, input).ndim
    shape[classes] = -1
    weighted = logs if weight is None else weight.reshape(shape) * logs
    labels = value_of(frame, target)
    if labels.is_floating_point():
        smooth = target * (1 - label_smoothing) + label_smoothing / count
        return -(smooth * weighted).sum(classes)
    hard, divisor = _nll(frame, logs, target, weight, ignore_index)
    if label_smoothing == 0:
        return hard, divisor
    each = -weighted.sum(classes) * (labels != ignore_index)
    return (1 - label_smoothing) * hard + label_smoothing / count * each, divisor


# Losses by their names in torch.nn.functional. A loss takes torch's arguments except the reduction. It returns the
# losses of the elements or examples, or a pair of them and the divisor of their mean.
LOSSES: dict[str, Callable[..., Any]] = {
    "mse_loss": _mse,
    "l1_loss": _l1,
    "smooth_l1_loss": _smooth_l1,
    "huber_loss": _huber,
    "binary_cross_entropy": _bce,
    "binary_cross_entropy_with_logits": _bce_with_logits,
    "soft_margin_loss": _soft_margin,
    "kl_div": _kl_div,
    "poisson_nll_loss": _poisson_nll,
    "gaussian_nll_loss": _gaussian_nll,
    "nll_loss": _nll,
    "cross_entropy": _cross_entropy,
}


def arguments_of(name: str) -> tuple[list[str], dict[str, Any]]:
    """Names and defaults of the arguments of a function in torch.nn.functional."""
    parameters = inspect.signature(getattr(functional, name), follow_wrapped=True).parameters
    return list(parameters), {key: each.default for key, each in parameters.items() if each.default is not each.empty}


def _enter(name: str, loss: Callable[..., Any]) -> None:
    names, defaults = arguments_of(name)

    def rule(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
        options = defaults | dict(zip(names, args, strict=False)) | kwargs
        reduction = reduction_of(options)
        over_batch = reduction == "batchmean" and name == "kl_div"
        if not over_batch and reduction not in REDUCTIONS:
            raise InputError(f"jet: {name}: reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
        found = loss(frame, **options)
        losses, divisor = found if isinstance(found, tuple) else (found, None)
        return losses.sum() / losses.shape[0] if over_batch else reduced(losses, reduction, divisor)

    enter(f"nn.{name}", rule)


for _name, _loss in LOSSES.items():
    _enter(_name, _loss)
