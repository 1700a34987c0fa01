"""Rules for writes at repeated indices, where an overwritten value has no derivative, and for scattering.

PyTorch's backward reads the cotangent at every index: an overwritten value gets the gradient of the value that stays.
In scattering, torch's rules mistake the shape of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Redirected
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.operator_rules import calls, rule_of
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import numbers_of
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any
from hodiff.torch_internals.operators import INDEX_PUT_OPERATORS
from hodiff.torch_operators.table import forms_of

REASON = (
    "a value that is overwritten at a repeated index gets the gradient of the value that is kept; torch documents "
    "repeated indices as undefined or not deterministic"
)
REFERENCE = "a gather of the values that are kept"


def overwrite(target: Tensor, values: Tensor, write: Callable[[Tensor, Tensor], Any], in_place: bool = False) -> Tensor:
    """Compute a write as a gather: each place takes the value that the same write leaves there."""
    # `write` writes values, of any shape that it accepts, into a tensor, and returns the result unless it is in place.
    kept = torch.full_like(target, -1, dtype=torch.long)
    written = write(kept, torch.arange(values.numel(), device=values.device).view(values.shape))
    kept = kept if in_place else written
    if not values.numel():
        return target if in_place else target.clone()
    result = torch.where(kept >= 0, values.to(target.dtype).flatten()[kept.clamp(min=0)], target)
    return target.copy_(result) if in_place else result


def scatter_repeats(input: Tensor, dim: int, index: Tensor) -> bool:
    """Whether `scatter` may write to an element twice."""
    numbers = _numbers(index)
    if numbers is None:
        return index.numel() > 1
    counts = numbers.new_zeros(input.shape, dtype=torch.int32)
    return bool(counts.scatter_add_(dim, numbers, counts.new_ones(index.shape)).max() > 1)


def _numbers(index: Tensor) -> Tensor | None:
    """Return the numbers of an index below all transforms; None if they differ within a batch or are not known yet."""
    return None if torch.compiler.is_compiling() or is_batched_by_any(index) else numbers_of(index)


def _repeats(indices: Sequence[Any]) -> bool:
    """Whether index tensors, one for each dimension, may name an element twice."""
    tensors = [torch.as_tensor(each, device=getattr(each, "device", "cpu")) for each in indices]
    numbers = [each for each in tensors if each.dtype not in (torch.bool, torch.uint8)]
    if all(each.numel() <= 1 for each in numbers):
        return False
    if len(numbers) < len(tensors):
        return True
    key: Any = 0
    for each in map(_numbers, numbers):
        if each is None or int(each.min()) < 0:
            return True
        key = key * (int(each.max()) + 1) + each.long()
    return bool(torch.bincount(key.flatten()).max() > 1)


def _written(
    function: Any, in_place: bool, target: Tensor, values: Tensor, indices: Sequence[Any], *before: Any
) -> Any:
    """Write by a function that takes the target, other arguments and the values; decline where no index repeats."""
    if values.dtype != target.dtype or not carry_derivatives((values,)) or not _repeats(indices):
        return UNNEEDED
    return overwrite(target, values, lambda x, y: function(x, *before, y), in_place)


def _enter(function: Any, in_place: bool) -> None:
    enter = register(
        *([function] if in_place else [function, getattr(torch, function.__name__)]),
        name=f"torch.{'Tensor.' if in_place else ''}{function.__name__}",
        routes=ROUTES[:3],
        reason=REASON,
        reference=REFERENCE,
    )

    def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
        if not index.dim() and in_transform():
            # Under vmap, torch indexes the batch dimension instead.
            return function(input, dim, index.view(1), source if source.dim() else source.view(1))
        return _written(function, in_place, input, source, [index], dim, index)

    def index_put(
        input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, unsafe: bool = False
    ) -> Any:
        del unsafe  # a parameter of the operator only
        present = [each for each in indices if each is not None]
        return UNNEEDED if accumulate else _written(function, in_place, input, values, present, indices)

    def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Any:
        return UNNEEDED if accumulate else _written(function, in_place, input, source, [index], index)

    name = function.__name__.removesuffix("_")
    rules: dict[str, Callable[..., Any]] = {"index_copy": index_copy, "index_put": index_put, "put": put}
    enter(rules[name])
    if name == "index_put":
        calls(function, INDEX_PUT_OPERATORS[in_place])(rule_of(function))


for _function in (Tensor.index_copy, Tensor.index_put, Tensor.put):
    _enter(_function, in_place=False)
for _function in (Tensor.index_copy_, Tensor.index_put_, Tensor.put_):
    _enter(_function, in_place=True)


def _enter_fill(*functions: Any, in_place: bool) -> None:
    @register(
        *functions,
        name=f"torch.{functions[0].__name__}",
        routes=ROUTES[1:],
        reason="under vmap, writing a batched value into an input that is not batched gives wrong results",
        reference="torch.where",
    )
    def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() or not input.dim() or not in_transform():
            return UNNEEDED
        row = torch.zeros(input.shape[dim], dtype=torch.bool, device=input.device)
        filled = row.index_fill(0, index, True).view(-1, *(1,) * (input.dim() - 1 - dim % input.dim()))
        result = torch.where(filled, value.to(input.dtype), input)
        return input.copy_(result) if in_place else result


_enter_fill(torch.index_fill, Tensor.index_fill, in_place=False)
_enter_fill(Tensor.index_fill_, in_place=True)


@register(
    *forms_of("fill_"),
    kind="missing",
    routes=ROUTES[1:],
    reason="under vmap, a batched value cannot be written into an input that is not batched",
    reference="copy_",
)
def _fill(input: Tensor, value: Any) -> Any:
    fills = isinstance(value, Tensor) and not value.dim() and in_transform()
    return input.copy_(value) if fills else UNNEEDED


@register(Tensor.__setitem__, routes=ROUTES[:3], reason=REASON, reference=REFERENCE)
def _setitem(self: Tensor, key: Any, value: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(self, Tensor):
        return UNNEEDED
    if not value.dim() and self.dim() and in_transform():
        return Redirected((self, key, value.view(1)))  # which torch copies, instead of filling as below
    parts = key if isinstance(key, tuple) else (key,)
    indices = [each for each in parts if isinstance(each, (Tensor, list, np.ndarray))]
    if not indices or not carry_derivatives((value,)) or not _repeats(indices):
        return UNNEEDED
    overwrite(self, value, lambda x, y: x.__setitem__(key, y), in_place=True)
    return None


def within(index: Tensor, source: Tensor) -> Tensor:
    """Return the part of a source that is scattered: the shape of its index."""
    return source[tuple(slice(k) for k in index.shape)]


_adding = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="if the source is larger than the index, its gradient has the wrong shape and autograd raises an error",
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


_adding(*forms_of("scatter_add"))(_from_part(torch.scatter_add))
_adding(Tensor.scatter_add_)(_from_part(Tensor.scatter_add_))
_overwriting = partial(register, routes=ROUTES[:3], reason=REASON, reference=REFERENCE)
_overwriting(*forms_of("scatter"))(_from_part(torch.scatter, overwrites=True))
_overwriting(Tensor.scatter_)(_from_part(Tensor.scatter_, overwrites=True, in_place=True))


_by_mask = partial(
    register,
    kind="missing",
    routes=("forward-over-reverse",),
    reason="the tangent of the source's gradient has the shape of the mask",
    reference="a gather from the source",
)


@_by_mask(*forms_of("masked_scatter"))
def _masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Any:
    if mask.dtype != torch.bool or input.dtype != source.dtype:
        return INVALID
    if not source.numel():
        return UNNEEDED
    input, mask = torch.broadcast_tensors(input, mask)
    places = (mask.flatten().cumsum(0) - 1).clamp(min=0).reshape(mask.shape)
    return torch.where(mask, source.flatten()[places], input)


_by_mask(Tensor.masked_scatter_)(in_place(_masked_scatter))
