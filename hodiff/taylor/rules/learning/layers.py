"""Rules for attention, dropout and embeddings, and for normalizations, from simpler functions of jets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import tensor_of
from hodiff.taylor.jets_in_arguments import value_of
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame


@rule("nn.embedding", "embedding", analytic=True)
def embedding(frame: Frame, func: Any, *args: Any, padding_idx: Any = None, max_norm: Any = None, **_: Any) -> Any:
    """Rows of the weight; the padding row is constant."""
    # torch.embedding takes the weight first.
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
        # Rows that are masked entirely are 0.
        blind = (value_of(frame, scores) == -math.inf).all(-1, keepdim=True)
        weights = weights.masked_fill(blind, 0.0)
    return torch.matmul(functional.dropout(weights, dropout_p), value)


@rule("dropout", "nn.dropout")
@rule("nn.dropout1d", "nn.dropout2d", "nn.dropout3d")
def dropout(frame: Frame, func: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Multiply by a random factor, which all coefficients share."""
    if not training or p == 0:
        return x
    return x * func(torch.ones_like(value_of(frame, x)), p, training)


def _normalized(x: Any, dims: Any, eps: float) -> Any:
    return _over_mean_square(x - x.mean(dims, keepdim=True), dims, eps)


def _over_mean_square(x: Any, dims: Any, eps: Any) -> Any:
    value = tensor_of(x)
    if value.dtype != torch.float64 and value.numel() and not torch.compiler.is_compiling():
        # Derivatives have powers of the mean square, which would leave the range of the dtype for large numbers.
        largest = value.detach().abs().amax(dims, keepdim=True)
        unit = torch.exp2(torch.log2(largest).ceil()).clamp(min=1)
        unit = torch.where(unit.isfinite(), unit, 1)
        x, eps = x / unit, eps / unit / unit
    return x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _per_channel(parameter: Any, rank: int) -> Any:
    return None if parameter is None else parameter.reshape(-1, *[1] * (rank - 2))


def _per_channels(x: Any, weight: Any, bias: Any) -> Any:
    return _affine(x, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim))


def _by_running(x: Any, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> Any:
    centred = x - _per_channel(mean, x.ndim)
    return _per_channels(centred * torch.rsqrt(_per_channel(variance, x.ndim) + eps), weight, bias)


@rule("layer_norm", "nn.layer_norm")
def layer_norm(
    frame: Frame, func: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Normalize over the last dimensions."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return _affine(_normalized(x, tuple(range(-len(shape), 0)), eps), weight, bias)


@rule("rms_norm", "nn.rms_norm")
def rms_norm(frame: Frame, func: Any, x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """Divide by the root of the mean square over the last dimensions."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(_over_mean_square(x, tuple(range(-len(shape), 0)), eps), weight, None)


@rule("group_norm", "nn.group_norm")
def group_norm(
    frame: Frame, func: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Normalize over the channels of a group and all positions."""
    apart = x.reshape(x.shape[0], groups, x.numel() // max(x.shape[0] * groups, 1))
    found = _normalized(apart, (-1,), eps).reshape(x.shape)
    return _per_channels(found, weight, bias)


@rule("nn.batch_norm")
def batch_norm(
    frame: Frame,
    func: Any,
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalize by batch statistics in training, which update the running statistics, else by the latter."""
    if not training:
        return _by_running(x, running_mean, running_var, weight, bias, eps)
    mean, variance = value_of(frame, (running_mean, running_var))
    functional.batch_norm(value_of(frame, x), mean, variance, None, None, True, momentum, eps)
    return _per_channels(_normalized(x, (0, *range(2, x.ndim)), eps), weight, bias)


@rule("nn.instance_norm")
def instance_norm(
    frame: Frame,
    func: Any,
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalize over the positions of each channel."""
    if not use_input_stats:
        return _by_running(x, running_mean, running_var, weight, bias, eps)
    mean, variance = value_of(frame, (running_mean, running_var))
    functional.instance_norm(value_of(frame, x), mean, variance, None, None, True, momentum, eps)
    return _per_channels(_normalized(x, tuple(range(2, x.ndim)), eps), weight, bias)
