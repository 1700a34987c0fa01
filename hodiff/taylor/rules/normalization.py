"""Softmax, variances and normalizations, made of simpler functions of jets."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import Jet
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


def _shift(frame: Frame, x: Any, dim: Any) -> Any:
    """The largest, a constant, or 0 where it is infinite."""
    largest = torch.amax(value_of(frame, x), dim, keepdim=True)
    return torch.where(torch.isfinite(largest), largest, 0)


@rule("softmax", "nn.softmax", "_softmax")
def softmax(frame: Frame, func: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Exp over its sum."""
    x = input if dtype is None else input.to(dtype)
    if x.ndim == 0:
        return torch.ones_like(value_of(frame, x)) + 0 * x
    e = torch.exp(x - _shift(frame, x, dim))
    return e / e.sum(dim, keepdim=True)


@rule("nn.softmin")
def softmin(frame: Frame, func: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Softmax of the negative."""
    return torch.softmax(-input, dim, dtype=dtype)


@rule("log_softmax", "nn.log_softmax", "_log_softmax")
def log_softmax(frame: Frame, func: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """X less logsumexp."""
    x = input if dtype is None else input.to(dtype)
    if x.ndim == 0:
        return 0 * x
    z = x - _shift(frame, x, dim)
    return z - torch.log(torch.exp(z).sum(dim, keepdim=True))


@rule("logsumexp")
def logsumexp(frame: Frame, func: Any, input: Any, dim: Any, keepdim: bool = False, *, out: None = None) -> Any:
    """The log of the sum, with the largest taken out."""
    if input.ndim == 0:
        return input + 0
    shift = _shift(frame, input, dim)
    found = torch.log(torch.exp(input - shift).sum(dim, keepdim=True)) + shift
    return found if keepdim else found.squeeze(dim)


@rule("logaddexp")
def logaddexp(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """The larger one, and softplus of how far the other is below."""
    x, y = value_of(frame, a), value_of(frame, b)
    first = x >= y
    below = torch.where(first, b - a, a - b)
    # Two equal infinities count as equal numbers.
    apart = torch.where((x == y) & torch.isinf(x), 0.0, below.value)
    return torch.where(first, a, b) - functional.logsigmoid(-Jet(frame, [apart, *below.coefficients[1:]]))


@rule("logaddexp2")
def logaddexp2(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """As logaddexp, to the base 2."""
    two = torch.log(torch.full((), 2.0, dtype=value_of(frame, a).dtype))
    return torch.logaddexp(a * two, b * two) / two


def _count(x: Any, dim: Any) -> int:
    dims = range(x.ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    count = 1
    for each in dims:
        count *= x.shape[each]
    return count


def _moments(x: Any, dim: Any, correction: float, keepdim: bool) -> Any:
    dims = tuple(range(x.ndim)) if dim is None or dim == () or dim == [] else dim
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    scale = max(_count(x, dims) - correction, 0)
    variance = (centred * centred).sum(dims, keepdim=keepdim) / scale
    return variance, mean if keepdim else x.mean(dims)


def _options(args: Any, kwargs: Any) -> tuple[Any, float, bool]:
    """dim, correction and keepdim in the forms that var has."""
    kwargs = dict(kwargs)
    dim = kwargs.pop("dim", kwargs.pop("axis", None))
    correction = kwargs.pop("correction", None)
    keepdim = kwargs.pop("keepdim", False)
    unbiased = kwargs.pop("unbiased", None)
    rest = list(args)
    if rest and isinstance(rest[0], bool):
        unbiased = rest.pop(0)
    elif rest:
        dim = rest.pop(0)
        if rest:
            unbiased = rest.pop(0)
        if rest:
            keepdim = rest.pop(0)
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    return dim, correction, keepdim


@rule("var")
def var(frame: Frame, func: Any, x: Any, *args: Any, out: None = None, **kwargs: Any) -> Any:
    """The mean square about the mean."""
    return _moments(x, *_options(args, kwargs))[0]


@rule("std")
def std(frame: Frame, func: Any, x: Any, *args: Any, out: None = None, **kwargs: Any) -> Any:
    """The root of the variance."""
    return torch.sqrt(_moments(x, *_options(args, kwargs))[0])


@rule("var_mean")
def var_mean(frame: Frame, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Both."""
    return tuple(_moments(x, *_options(args, kwargs)))


@rule("std_mean")
def std_mean(frame: Frame, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Both."""
    variance, mean = _moments(x, *_options(args, kwargs))
    return torch.sqrt(variance), mean


def _normalized(x: Any, dims: Any, eps: float) -> Any:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _per_channel(parameter: Any, rank: int) -> Any:
    return None if parameter is None else parameter.reshape(-1, *[1] * (rank - 2))


@rule("layer_norm", "nn.layer_norm")
def layer_norm(
    frame: Frame, func: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Over the last dimensions."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return _affine(_normalized(x, tuple(range(-len(shape), 0)), eps), weight, bias)


@rule("rms_norm", "nn.rms_norm")
def rms_norm(frame: Frame, func: Any, x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """By the root of the mean square."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * torch.rsqrt((x * x).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps), weight, None)


@rule("group_norm", "nn.group_norm")
def group_norm(
    frame: Frame, func: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Over the channels of a group and all places."""
    apart = x.reshape(x.shape[0], groups, x.numel() // max(x.shape[0] * groups, 1))
    found = _normalized(apart, (-1,), eps).reshape(x.shape)
    return _affine(found, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim))


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
    """By statistics of the batch in training, which torch keeps of the value; by the running ones otherwise."""
    rank = x.ndim
    if training:
        mean, variance = value_of(frame, (running_mean, running_var))
        functional.batch_norm(value_of(frame, x), mean, variance, None, None, True, momentum, eps)
        found = _normalized(x, (0, *range(2, rank)), eps)
    else:
        mean, variance = _per_channel(running_mean, rank), _per_channel(running_var, rank)
        found = (x - mean) * torch.rsqrt(variance + eps)
    return _affine(found, _per_channel(weight, rank), _per_channel(bias, rank))


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
    """Over the places of each channel."""
    rank = x.ndim
    if use_input_stats:
        mean, variance = value_of(frame, (running_mean, running_var))
        functional.instance_norm(value_of(frame, x), mean, variance, None, None, True, momentum, eps)
        found = _normalized(x, tuple(range(2, rank)), eps)
    else:
        mean, variance = _per_channel(running_mean, rank), _per_channel(running_var, rank)
        found = (x - mean) * torch.rsqrt(variance + eps)
    return _affine(found, _per_channel(weight, rank), _per_channel(bias, rank))


@rule("nn.normalize")
def normalize(
    frame: Frame, func: Any, x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Any:
    """Over the norm, or eps where that is larger."""
    return x / torch.clamp_min(torch.linalg.vector_norm(x, p, dim, keepdim=True), eps)


@rule("linalg.vector_norm")
def vector_norm(
    frame: Frame,
    func: Any,
    x: Any,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **_: Any,
) -> Any:
    """By the definition."""
    x = x if dtype is None else x.to(dtype)
    dims = tuple(range(x.ndim)) if dim is None else dim
    size = torch.abs(x)
    if ord == float("inf"):
        return torch.amax(size, dims, keepdim=keepdim)
    if ord == -float("inf"):
        return torch.amin(size, dims, keepdim=keepdim)
    if ord == 0:
        return torch.linalg.vector_norm(value_of(frame, x), 0, dim, keepdim)
    if ord == 1:
        return size.sum(dims, keepdim=keepdim)
    if ord == 2:
        squares = (x * x).sum(dims, keepdim=keepdim)
        # At 0 torch's derivative is 0.
        still = value_of(frame, squares) == 0
        return torch.where(still, 0.0, torch.sqrt(torch.where(still, 1.0, squares)))
    return torch.pow(torch.pow(size, ord).sum(dims, keepdim=keepdim), 1 / ord)


@rule("linalg.norm", "norm")
def norm(
    frame: Frame, func: Any, x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """That of vectors, of all elements or of a dimension."""
    ord = kwargs.pop("p", ord)
    if ord == "fro" or ord is None:
        return torch.linalg.vector_norm(x, 2, dim, keepdim)
    number = isinstance(ord, (int, float))
    classic = not getattr(func, "__name__", "").startswith("linalg")
    if number and (classic or isinstance(dim, int) or (dim is None and x.ndim == 1)):
        return torch.linalg.vector_norm(x, ord, dim, keepdim)
    return unknown(frame, func, (x, ord, dim, keepdim), kwargs)


@rule("cosine_similarity", "nn.cosine_similarity")
def cosine_similarity(frame: Frame, func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """The product of the two directions."""
    a = x1 / torch.clamp_min(torch.linalg.vector_norm(x1, 2, dim, keepdim=True), eps)
    b = x2 / torch.clamp_min(torch.linalg.vector_norm(x2, 2, dim, keepdim=True), eps)
    return (a * b).sum(dim)
