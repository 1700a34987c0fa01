"""Losses and attention, made of simpler functions of jets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import Jet
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


def reduced(losses: Any, reduction: str, weight: Any = None) -> Any:
    """The mean, the sum or each; a weighted mean is over the weights."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / (losses.numel() if weight is None else weight)


@rule("nn.mse_loss")
def mse_loss(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    """Squares."""
    error = input - target
    losses = error * error if weight is None else weight * (error * error)
    return reduced(losses, reduction, None if weight is None else weight.sum())


@rule("nn.l1_loss")
def l1_loss(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    """Absolute values."""
    losses = torch.abs(input - target)
    losses = losses if weight is None else weight * losses
    return reduced(losses, reduction, None if weight is None else weight.sum())


@rule("nn.smooth_l1_loss")
def smooth_l1_loss(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Any:
    """A parabola to beta, the line above."""
    error = input - target
    if beta == 0:
        return reduced(torch.abs(error), reduction)
    size = torch.abs(error)
    near = value_of(frame, size) < beta
    return reduced(torch.where(near, error * error / (2 * beta), size - beta / 2), reduction)


@rule("nn.huber_loss")
def huber_loss(
    frame: Frame, func: Any, input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> Any:
    """A parabola to delta, the line above."""
    error = input - target
    size = torch.abs(error)
    near = value_of(frame, size) < delta
    losses = torch.where(near, error * error / 2, delta * (size - delta / 2))
    losses = losses if weight is None else weight * losses
    return reduced(losses, reduction, None if weight is None else weight.sum())


@rule("nn.binary_cross_entropy_with_logits")
def bce_with_logits(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    """Softplus of the logits, as they miss the target."""
    high = -functional.logsigmoid(input)
    low = -functional.logsigmoid(-input)
    losses = (1 - target) * low + target * (high if pos_weight is None else pos_weight * high)
    return reduced(losses if weight is None else weight * losses, reduction)


@rule("nn.kl_div")
def kl_div(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """The target's entropy less its mean of the input."""
    losses = torch.exp(target) * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "batchmean":
        return losses.sum() / value_of(frame, losses).shape[0]
    return reduced(losses, reduction)


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
    """The picked entries, weighted by their classes."""
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
    """Of log_softmax: the picked entries, or the mean under a distribution."""
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


@rule("scaled_dot_product_attention", "nn.scaled_dot_product_attention")
def attention(
    frame: Frame,
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q k / √d + mask) v."""
    if enable_gqa:
        repeats = value_of(frame, query).shape[-3] // value_of(frame, key).shape[-3]
        key = torch.repeat_interleave(key, repeats, -3)
        value = torch.repeat_interleave(value, repeats, -3)
    width = value_of(frame, query).shape[-1]
    scores = torch.matmul(query * (1 / math.sqrt(width) if scale is None else scale), key.transpose(-2, -1))
    if is_causal:
        rows, columns = value_of(frame, scores).shape[-2:]
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=value_of(frame, query).device).tril()
    if attn_mask is not None:
        boolean = value_of(frame, attn_mask).dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:
        # Rows that see nothing are 0.
        blind = (value_of(frame, scores) == -math.inf).all(-1, keepdim=True)
        weights = weights.masked_fill(blind, 0.0)
    return torch.matmul(functional.dropout(weights, dropout_p), value)


@rule("dropout", "nn.dropout", "nn.dropout1d", "nn.dropout2d", "nn.dropout3d")
def dropout(frame: Frame, func: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """A random factor, the same for all coefficients."""
    if not training or p == 0:
        return x
    return x * func(torch.ones_like(value_of(frame, x)), p, training)


@rule("nn.binary_cross_entropy")
def binary_cross_entropy(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Of probabilities; logarithms stop at -100."""
    high = torch.clamp(torch.log(input), min=-100)
    low = torch.clamp(torch.log1p(-input), min=-100)
    losses = -(target * high + (1 - target) * low)
    return reduced(losses if weight is None else weight * losses, reduction)


@rule("nn.soft_margin_loss")
def soft_margin_loss(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """log(1 + exp(-y x))."""
    return reduced(-functional.logsigmoid(target * input), reduction)


@rule("nn.gaussian_nll_loss")
def gaussian_nll_loss(
    frame: Frame,
    func: Any,
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Of a normal distribution whose variance is at least eps, the bound a constant."""
    if isinstance(var, float):
        var = var * torch.ones_like(value_of(frame, input))
    elif value_of(frame, var).shape != value_of(frame, input).shape:
        smaller = value_of(frame, var).ndim < value_of(frame, input).ndim
        var = var.unsqueeze(-1) if smaller and value_of(frame, input).shape[:-1] == value_of(frame, var).shape else var
    bounded: Any = torch.where(value_of(frame, var) < eps, torch.full((), eps, dtype=var.dtype), var)
    # torch takes the derivative as if the bound were not there.
    if isinstance(var, Jet):
        bounded = Jet(frame, [value_of(frame, bounded), *var.coefficients[1:]])
    error = input - target
    losses = (torch.log(bounded) + error * error / bounded) / 2
    return reduced(losses + math.log(2 * math.pi) / 2 if full else losses, reduction)


@rule("nn.embedding", "embedding", analytic=True)
def embedding(frame: Frame, func: Any, *args: Any, padding_idx: Any = None, max_norm: Any = None, **_: Any) -> Any:
    """Rows of the weight; that of padding is a constant."""
    # torch.embedding has the arguments the other way round.
    first_is_weight = value_of(frame, args[0]).is_floating_point()
    weight, indices = (args[0], args[1]) if first_is_weight else (args[1], args[0])
    if not first_is_weight:
        padding_idx = args[2] if len(args) > 2 else padding_idx
        max_norm = args[3] if len(args) > 3 else max_norm
    elif len(args) > 2:
        padding_idx = args[2] if args[2] >= 0 else None
    if max_norm is not None:
        return unknown(frame, func, args, {"padding_idx": padding_idx, "max_norm": max_norm, **_})
    rows = torch.index_select(weight, 0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[-1])
    if padding_idx is None:
        return rows
    padding_idx %= weight.shape[0]
    return torch.where((indices == padding_idx).unsqueeze(-1), value_of(frame, rows), rows)
