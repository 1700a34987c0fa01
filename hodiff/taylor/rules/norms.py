"""Rules for norms of vectors, distances, normalized vectors, variances and standard deviations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import moves, value_of
from hodiff.taylor.registry import analytic_rule, name_of, rule
from hodiff.taylor.rules.arithmetic import of_one, with_value
from hodiff.taylor.rules.elementary import ELEMENTARY
from hodiff.taylor.series import Frame, filled
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


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


def at_zeros(frame: Frame, length: Any, still: Any, x: Any, inner: Callable[[Any, Any], Any]) -> Any:
    """Series of a length where it is 0: |x(t)| = t |x_1 + x_2 t + ...|; `Frame.kink` has the sign of t."""
    # `still` is the mask of lengths that are 0, and the length is the root of the inner product along one direction.
    # The highest coefficient of a collapsed series is no direction's; of a length that is 0 odd powers alone have it.
    orders = [k for k in range(1, frame.order + 1) if frame.has_axis(k) or frame.directions is None]
    if not orders or torch.compiler.is_compiling() or not moves(frame, x) or not _any(still):
        return length
    parts = [filled(frame, x.coefficients, k, x.value) for k in orders]
    product = inner if frame.directions is None else torch.func.vmap(inner)
    series = _length_series(parts, product)
    frame.meets_kink()
    found = []
    for k, each in enumerate(length.coefficients):
        if k in orders:
            dense, other = filled(frame, length.coefficients, k, length.value), frame.kink.side * series[k - 1]
            each = torch.where(still, other, dense)
        found.append(each)
    return new_jet(frame, found)


def _length_series(x: Sequence[Any], inner: Callable[[Any, Any], Any]) -> list[Any]:
    """Coefficients of |x(t)| for t > 0; coefficients that would need unknown ones are 0."""
    squares = [sum(inner(x[j], x[k - j]) for j in range(k + 1)) for k in range(len(x))]
    zero = squares[0] == 0
    series = [torch.sqrt(torch.where(zero, 1.0, squares[0]))]
    for k in range(1, len(x)):
        rest = sum(series[j] * series[k - j] for j in range(1, k))
        series.append((squares[k] - rest) / (2 * series[0]))
    shifted = [torch.zeros_like(squares[0])] * len(x)
    if len(x) > 1 and _any(zero):
        shifted = [shifted[0], *_length_series(x[1:], inner)]
    return [torch.where(zero, low, each) for low, each in zip(shifted, series, strict=True)]


def _any(condition: Any) -> bool:
    while isinstance(condition, Jet):
        condition = condition.value
    return bool(below_transforms(condition).any())


@rule("nn.normalize")
def normalize(
    frame: Frame, func: Any, x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Any:
    """Divide by the norm, or by eps if eps is larger."""
    return x / torch.clamp_min(torch.linalg.vector_norm(x, p, dim, keepdim=True), eps)


@analytic_rule("linalg.vector_norm")
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
    """Vector norm, by the definition."""
    x = x if dtype is None else x.to(dtype)
    if x.is_complex():
        if ord != 2:
            return torch.linalg.vector_norm(torch.abs(x), ord, dim, keepdim)
        given = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
        parts = torch.stack([torch.real(x), torch.imag(x)], -1)
        return torch.linalg.vector_norm(parts, 2, (-1, *(each % x.ndim for each in given)), keepdim=keepdim).reshape(
            torch.linalg.vector_norm(value_of(frame, x), 2, dim, keepdim).shape
        )
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
        if _are_usual(value_of(frame, squares)):
            return torch.sqrt(squares)
        scale = _scale(value_of(frame, x), dims)
        scaled = x / scale
        squares = (scaled * scaled).sum(dims, keepdim=keepdim)
        still = value_of(frame, squares) == 0
        scale = scale if keepdim else scale.sum(dims)
        length = torch.where(still, 0.0, scale * torch.sqrt(torch.where(still, 1.0, squares)))
        return at_zeros(frame, length, still, x, lambda a, b: (a * b).sum(dims, keepdim=keepdim))
    return torch.pow(torch.pow(size, ord).sum(dims, keepdim=keepdim), 1 / ord)


def _are_usual(squares: Any) -> bool:
    """Whether squared lengths are far enough from 0 and infinity that their powers are finite."""
    while isinstance(squares, Jet):
        squares = squares.value
    if torch.compiler.is_compiling() or not squares.numel():
        return False
    low, high = torch.aminmax(below_transforms(squares.detach()))
    limit = torch.finfo(squares.dtype).max ** 0.125
    return bool(low > 1 / limit) and bool(high < limit)


def _scale(value: Any, dims: Any) -> Any:
    """Largest element, rounded to a power of two, or 1: squares of scaled elements neither under- nor overflow."""
    if not value.numel():
        return torch.ones_like(value.sum(dims, keepdim=True))
    largest = torch.amax(torch.abs(value.detach()), dims, keepdim=True)
    usual = (largest > 0) & (largest < float("inf"))
    return torch.where(usual, torch.exp2(torch.floor(torch.log2(largest))), 1.0)


@analytic_rule("abs")
def absolute(frame: Frame, func: Any, x: Any, *, out: None = None) -> Any:
    """Absolute value, as the length of a vector of one element, or of two parts."""
    if x.is_complex():
        length = torch.linalg.vector_norm(torch.stack([torch.real(x), torch.imag(x)], -1), 2, -1)
        return with_value(frame, torch.abs(value_of(frame, x)), length)
    length = of_one(frame, x, ELEMENTARY["abs"])
    return at_zeros(frame, length, value_of(frame, x) == 0, x, torch.mul)


@rule("dist")
def dist(frame: Frame, func: Any, x: Any, other: Any, p: Any = 2) -> Any:
    """Norm of the difference."""
    return torch.linalg.vector_norm(x - other, p)


@rule("nn.pairwise_distance", "pairwise_distance")
def pairwise_distance(
    frame: Frame, func: Any, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Norm of the difference along the last dimension."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@rule("cdist")
def cdist(frame: Frame, func: Any, x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """Norms of the differences between rows of x1 and x2."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


@rule("nn.pdist", "pdist")
def pdist(frame: Frame, func: Any, x: Any, p: float = 2.0) -> Any:
    """Norms of the differences of all pairs of rows."""
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)


@analytic_rule("linalg.matrix_norm")
def matrix_norm(
    frame: Frame, func: Any, x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, **kwargs: Any
) -> Any:
    """Frobenius norm, as a vector norm of two dimensions; other norms use nested forward mode."""
    if ord == "fro":
        return torch.linalg.vector_norm(x, 2, dim, keepdim, **kwargs)
    return unknown(frame, func, (x, ord, dim, keepdim), kwargs)


@analytic_rule("linalg.norm", "norm")
def norm(
    frame: Frame, func: Any, x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Vector norm of all elements or of one dimension; other norms use nested forward mode."""
    ord = kwargs.pop("p", ord)
    if ord == "fro" or ord is None:
        return torch.linalg.vector_norm(x, 2, dim, keepdim)
    number = isinstance(ord, (int, float))
    classic = not name_of(func).startswith("linalg")
    if number and (classic or isinstance(dim, int) or (dim is None and x.ndim == 1)):
        return torch.linalg.vector_norm(x, ord, dim, keepdim)
    return unknown(frame, func, (x, ord, dim, keepdim), kwargs)


@rule("cosine_similarity", "nn.cosine_similarity")
def cosine_similarity(frame: Frame, func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Inner product of the normalized vectors, which broadcast before."""
    x1, x2 = torch.broadcast_tensors(x1, x2)
    a = x1 / torch.clamp_min(torch.linalg.vector_norm(x1, 2, dim, keepdim=True), eps)
    b = x2 / torch.clamp_min(torch.linalg.vector_norm(x2, 2, dim, keepdim=True), eps)
    return (a * b).sum(dim)
