"""Rules for scattering, where torch's rules mistake the shape of the source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.indexing.overwriting import REASON, REFERENCE, overwrite, scatter_repeats
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import carry_derivatives


def within(index: Tensor, source: Tensor) -> Tensor:
    """Return the part of a source that is scattered: the shape of its index."""
    return source[tuple(slice(k) for k in index.shape)]


_adding = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="the gradient of a source larger than its index has a shape that autograd refuses",
    reference="the part of the source that is scattered",
)


def _from_part(function: Callable[..., Tensor], *, overwrites: bool = False, in_place: bool = False) -> Any:
    """Return a rule that calls the function with the part of its source that is scattered."""

    def rule(input: Tensor, dim: int, index: Tensor, src: Any = None, **options: Any) -> Any:
        if not isinstance(src, Tensor):
            return UNNEEDED
        if src.dim() != index.dim() or any(n < k for n, k in zip(src.shape, index.shape, strict=True)):
            return INVALID if src.dim() else UNNEEDED
        differentiated = overwrites and not options and src.dtype == input.dtype and carry_derivatives((src,))
        if differentiated and scatter_repeats(input, dim, index):
            return overwrite(input, within(index, src), lambda x, y: function(x, dim, index, y), in_place)
        return UNNEEDED if src.shape == index.shape else function(input, dim, index, within(index, src), **options)

    return rule


_adding(torch.scatter_add, Tensor.scatter_add, name="torch.scatter_add")(_from_part(torch.scatter_add))
_adding(Tensor.scatter_add_)(_from_part(Tensor.scatter_add_))
_overwriting = partial(register, routes=ROUTES[:3], reason=REASON, reference=REFERENCE)
_overwriting(torch.scatter, Tensor.scatter, name="torch.scatter")(_from_part(torch.scatter, overwrites=True))
_overwriting(Tensor.scatter_)(_from_part(Tensor.scatter_, overwrites=True, in_place=True))


_by_mask = partial(
    register,
    kind="missing",
    routes=("forward-over-reverse",),
    reason="the tangent of the source's gradient has the shape of the mask",
    reference="a gather from the source",
)


@_by_mask(torch.masked_scatter, Tensor.masked_scatter, name="torch.masked_scatter")
def _masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Any:
    if mask.dtype != torch.bool or input.dtype != source.dtype:
        return INVALID
    if not source.numel():
        return UNNEEDED
    input, mask = torch.broadcast_tensors(input, mask)
    places = (mask.flatten().cumsum(0) - 1).clamp(min=0).reshape(mask.shape)
    return torch.where(mask, source.flatten()[places], input)


@_by_mask(Tensor.masked_scatter_)
def _masked_scatter_(input: Tensor, mask: Tensor, source: Tensor) -> Any:
    result = _masked_scatter(input.clone(), mask, source)
    return result if isinstance(result, Declined) else input.copy_(result)
