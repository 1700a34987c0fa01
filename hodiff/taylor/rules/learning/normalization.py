"""Rules for layer, group, batch and instance normalization, from simpler functions of jets."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


def _normalized(x: Any, dims: Any, eps: float) -> Any:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)


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
    return _affine(x * torch.rsqrt((x * x).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps), weight, None)


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
