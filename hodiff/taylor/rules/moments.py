"""Rules for variances and standard deviations, with all of torch's signatures."""

from __future__ import annotations

import math
from typing import Any

import torch

from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame


def _count(x: Any, dim: Any) -> int:
    dims = range(x.ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    count = 1
    for each in dims:
        count *= x.shape[each] if x.ndim else 1
    return count


def _moments(x: Any, dim: Any, correction: float, keepdim: bool) -> Any:
    dims = tuple(range(x.ndim)) if dim is None or dim == () or dim == [] else dim
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    scale = max(_count(x, dims) - correction, 0)
    variance = (centred * centred).sum(dims, keepdim=keepdim) / scale
    return variance, mean if keepdim else x.mean(dims)


def _options(args: Any, kwargs: Any) -> tuple[Any, float, bool]:
    """Read dim, correction and keepdim from the arguments of var."""
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
    """Mean square deviation from the mean."""
    return _moments(x, *_options(args, kwargs))[0]


@rule("std")
def std(frame: Frame, func: Any, x: Any, *args: Any, out: None = None, **kwargs: Any) -> Any:
    """Square root of the variance."""
    dim, correction, keepdim = _options(args, kwargs)
    dims = tuple(range(x.ndim)) if dim is None or dim == () or dim == [] else dim
    centred = x - x.mean(dims, keepdim=True)
    scale = max(_count(x, dims) - correction, 0)
    return torch.linalg.vector_norm(centred, 2, dims, keepdim) / math.sqrt(scale)


@rule("var_mean")
def var_mean(frame: Frame, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Variance and mean."""
    return tuple(_moments(x, *_options(args, kwargs)))


@rule("std_mean")
def std_mean(frame: Frame, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Standard deviation and mean."""
    return std(frame, func, x, *args, **kwargs), _moments(x, *_options(args, kwargs))[1]
