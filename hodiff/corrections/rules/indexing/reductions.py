"""Rules for reductions by index and by segment."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value
from hodiff.corrections.rules.indexing.overwriting import within
from hodiff.corrections.rules.indexing.prod import products_by_index
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_operators.table import forms_of

_SOURCE = "Hillis & Steele, Data parallel algorithms (1986)"


def _floating(*args: Any, out: Any = None, **kwargs: Any) -> bool:
    tensor = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
    return out is None and tensor is not None and tensor.is_floating_point()


_scattered = partial(
    register,
    routes=ROUTES,
    reason="for products, forward mode returns 0, and second derivatives are wrong at two zeros; a source larger than "
    "its index raises an error",
    reference=_SOURCE,
    covers=_floating,
)


@_scattered(*forms_of("scatter_reduce"))
def _scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce != "prod" and src.shape == index.shape:
        return UNNEEDED
    if not _fits(input, dim, index, src):
        return INVALID
    return _reduced_by_index(input, dim, index, within(index, src), reduce, include_self)


def _reduced_by_index(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool
) -> Tensor:
    """Compute `scatter_reduce` for a source with the shape of its index."""
    if reduce != "prod":
        return torch.scatter_reduce(input, dim, index, source, reduce, include_self=include_self)
    if input.dim() == 0:
        return _reduced_by_index(input[None], 0, index[None], source[None], reduce, include_self)[0]
    if index.numel() == 0:
        return input.clone()
    products = products_by_index(
        source.movedim(dim, -1), index.movedim(dim, -1), input.movedim(dim, -1), include_target=include_self
    )
    value = torch.scatter_reduce(input.detach(), dim, index, source.detach(), reduce, include_self=include_self)
    return with_value(products.movedim(-1, dim).contiguous(), value)


def _fits(input: Tensor, dim: int, index: Tensor, src: Tensor) -> bool:
    """Whether shapes, dtypes and dimension are valid; torch refuses other arguments."""
    return (
        input.dim() == index.dim() == src.dim()
        and all(k <= n for k, n in zip(index.shape, src.shape, strict=True))
        and input.dtype == src.dtype
        and index.dtype == torch.int64
        and -max(input.dim(), 1) <= dim < max(input.dim(), 1)
    )


_scattered(torch.Tensor.scatter_reduce_)(in_place(_scatter_reduce))
_indexed = partial(
    register,
    kind="missing",
    routes=ROUTES[1:],
    reason="there is no forward rule",
    reference="torch.scatter_reduce",
    covers=_floating,
)


@_indexed(*forms_of("index_reduce"))
def _index_reduce(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if index.dim() > 1 or source.dim() != input.dim() or reduce not in _INDEX_REDUCTIONS:
        return INVALID
    if input.dim() == 0:
        result = _index_reduce(input[None], 0, index.reshape(1), source[None], reduce, include_self=include_self)
        return result if isinstance(result, Declined) else result[0]
    axis = dim % input.dim()
    sizes = [*input.shape[:axis], index.numel(), *input.shape[axis + 1 :]]
    if list(source.shape) != sizes:
        return INVALID
    shape = [1] * input.dim()
    shape[axis] = -1
    places = index.to(torch.int64).reshape(shape).expand(source.shape)
    if input.dtype != source.dtype:
        return INVALID
    return _reduced_by_index(input, axis, places, source, reduce, include_self)


_indexed(torch.Tensor.index_reduce_)(in_place(_index_reduce))
_INDEX_REDUCTIONS = ("prod", "mean", "amax", "amin")


@register(
    torch.segment_reduce,
    kind="missing",
    routes=ROUTES,
    reason="the backward pass has no derivative, and there is no forward rule",
    reference="torch.scatter_reduce",
    covers=_floating,
)
def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    bounds = lengths if offsets is None else offsets
    if reduce not in _SEGMENT_REDUCTIONS or indices is not None or bounds is None or axis != bounds.dim() - 1:
        return INVALID
    if offsets is None:
        offsets = torch.cat([bounds.new_zeros(*bounds.shape[:-1], 1), bounds.cumsum(-1)], -1)
        if not unsafe and not _is_hidden(offsets) and bool((offsets[..., -1] != data.shape[axis]).any()):
            return INVALID
    count = offsets.shape[-1] - 1
    places = _segments(offsets, data.shape[axis]).movedim(-1, axis)
    places = places.reshape(*places.shape, *(1,) * (data.dim() - places.dim())).expand(data.shape)
    x, places = data.movedim(axis, -1), places.movedim(axis, -1)
    # An extra place takes the elements outside all segments.
    result = _SEGMENT_REDUCTIONS[reduce](x, places, count + 1, initial)
    return result[..., :count].movedim(-1, axis).contiguous()


def _is_hidden(tensor: Tensor) -> bool:
    """Whether a transform or a compiler hides the numbers."""
    return torch.compiler.is_compiling() or is_wrapped(tensor)


def _segments(offsets: Tensor, n: int) -> Tensor:
    """Segment number of each of n elements; the number of segments for elements outside."""
    positions = torch.arange(n, dtype=offsets.dtype, device=offsets.device).expand(*offsets.shape[:-1], n).contiguous()
    segments = torch.searchsorted(offsets[..., 1:].contiguous(), positions, right=True)
    return segments.where(positions >= offsets[..., :1], offsets.shape[-1] - 1)


def _totals(x: Tensor, places: Tensor, count: int, initial: float | None) -> Tensor:
    return x.new_full((*x.shape[:-1], count), initial or 0.0).scatter_add(-1, places, x)


def _means(x: Tensor, places: Tensor, count: int, initial: float | None) -> Tensor:
    sizes = _totals(torch.ones_like(x), places, count, None)
    empty = torch.nan if initial is None else initial
    return (_totals(x, places, count, initial) / sizes.clamp(min=1)).where(sizes > 0, empty)


def _segment_products(x: Tensor, places: Tensor, count: int, initial: float | None) -> Tensor:
    start = x.new_full((*x.shape[:-1], count), 1.0 if initial is None else initial)
    return products_by_index(x, places, start, include_target=True)


def _maxima(x: Tensor, places: Tensor, count: int, initial: float | None) -> Tensor:
    least = x.new_full((*x.shape[:-1], count), -torch.inf)
    result = least.scatter_reduce(-1, places, x, "amax", include_self=False)
    # At a tie the gradient goes to the data.
    return result if initial is None else result.where(result >= initial, initial)


def _minima(x: Tensor, places: Tensor, count: int, initial: float | None) -> Tensor:
    return -_maxima(-x, places, count, None if initial is None else -initial)


_SEGMENT_REDUCTIONS = {
    "sum": _totals,
    "mean": _means,
    "prod": _segment_products,
    "max": _maxima,
    "min": _minima,
}
