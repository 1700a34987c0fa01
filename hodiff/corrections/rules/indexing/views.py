"""Rules for `as_strided_scatter`, `masked_select`, `tensor_split` at a tensor, `flip` and `roll` of numbers, copies.

Functions that copy their input have the input's tangent itself in torch's forward mode. If either tensor is changed in
place later, so is the tangent of the other, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.wrapped_tensors import below_derivatives, is_wrapped
from hodiff.torch_operators.table import forms_of


def _broadcasts(input: Any, mask: Any = None, *_: Any, **__: Any) -> bool:
    return isinstance(mask, Tensor) and input.shape != mask.shape


@register(
    *forms_of("masked_select"),
    routes=ROUTES[:1],
    reason="under vmap, the gradient is wrong or raises an error if the mask has more dimensions than the input",
    reference="the selection from both after they are broadcast",
    covers=_broadcasts,
)
def _masked_select(input: Tensor, mask: Tensor) -> Any:
    if mask.dtype != torch.bool:
        return INVALID
    return torch.masked_select(*torch.broadcast_tensors(input, mask)) if _broadcasts(input, mask) else UNNEEDED


def _is_by_tensor(input: Any, tensor_indices_or_sections: Any = None, *_: Any, **__: Any) -> bool:
    return isinstance(tensor_indices_or_sections, Tensor) and not torch.compiler.is_compiling()


@register(
    *forms_of("tensor_split"),
    kind="missing",
    routes=ROUTES,
    reason="a tensor of indices cannot be read inside a transform",
    reference="the same function with indices as ints",
    covers=_is_by_tensor,
)
def _tensor_split(input: Tensor, tensor_indices_or_sections: Tensor, dim: int = 0) -> Any:
    places = below_derivatives(tensor_indices_or_sections)
    # Torch refuses indices that differ within a batch, and other dtypes.
    if is_wrapped(places) or places.dtype != torch.int64 or places.dim() > 1:
        return INVALID
    return torch.tensor_split(input, places.tolist(), dim)


def _is_number(input: Tensor, *_: Any, **__: Any) -> bool:
    return not input.dim()


def _of_number(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input.clone()


for _name, _reason in (
    ("flip", "under vmap, a tensor without dimensions raises an error"),
    ("roll", "under vmap, tensors without dimensions are rolled along the batch"),
):
    _functions = getattr(torch, _name), getattr(Tensor, _name)
    _rule = register(
        *_functions, name=f"torch.{_name}", routes=ROUTES, reason=_reason, reference="the input", covers=_is_number
    )
    _rule(_of_number)


@register(
    *forms_of("as_strided_scatter"),
    routes=ROUTES[:3],
    reason="the gradient of the input, also the first, is that of the overwritten elements, instead of the others",
    reference="torch.scatter at the indices that the strides define",
)
def _as_strided_scatter(
    input: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    if input.dtype != src.dtype or src.shape != torch.Size(size) or _coincide(size, stride):
        return INVALID
    if not input.is_contiguous():
        return unable("the storage of the input is no row of numbers")
    start = 0 if storage_offset is None else storage_offset - int(input.storage_offset())
    places = torch.tensor(start, device=input.device)
    for n, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + step * torch.arange(n, device=input.device)
    end = start + sum(step * (n - 1) for n, step in zip(size, stride, strict=True))
    write = _last_of if start < 0 or end >= input.numel() or _meet(size, stride) else _each_of
    return write(input.reshape(-1), places.reshape(-1), src.reshape(-1)).reshape(input.shape)


def _each_of(input: Tensor, places: Tensor, src: Tensor) -> Tensor:
    return input.scatter(0, places, src)


def _last_of(input: Tensor, places: Tensor, src: Tensor) -> Tensor:
    """Scatter where places repeat or lie outside: the last value at a place stays, values outside are dropped."""
    if not input.numel() or not src.numel():
        return input.clone()
    order = torch.arange(src.numel(), device=input.device)
    order = order.where((places >= 0) & (places < input.numel()), -1)
    last = torch.full(input.shape, -1, device=input.device)
    last = last.scatter_reduce(0, places.clamp(0, input.numel() - 1), order, "amax")
    return torch.where(last >= 0, src[last.clamp(min=0)], input)


def _meet(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two indices may address the same place."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def _coincide(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether all indices of a dimension address the same place."""
    return any(step == 0 and n > 1 for n, step in zip(size, stride, strict=True))


_COPIES = """
    alias_copy as_strided_copy diagonal_copy expand_copy permute_copy select_copy slice_copy split_copy
    split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy
    view_as_real_copy
"""
# Their derivative by the first argument is 1.
_REMAINDERS = "frac fmod remainder"


def _copied(function: Callable[..., Any], *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """Call torch's function, and copy its results with their tangents."""
    if out is not None or not (torch.compiler.is_compiling() or in_forward_mode()):
        return UNNEEDED
    results = function(*args, **kwargs)
    return results.clone() if isinstance(results, Tensor) else type(results)(each.clone() for each in results)


def _view_copy(input: Tensor, *shape: Any, **options: Any) -> Tensor:
    """Copy a view; forward mode would refuse tensors that have no view of that shape, which torch itself copies."""
    size = shape[0] if len(shape) == 1 else options.get("size")
    return (
        torch.view_copy(input, *shape, **options)
        if size is None or isinstance(size, torch.dtype)
        else input.reshape(size)
    )


for _name in (*_COPIES.split(), *_REMAINDERS.split()):
    _function = _view_copy if _name == "view_copy" else getattr(torch, _name)
    register(
        *forms_of(_name),
        routes=ROUTES[1:],
        reason="in forward mode the result shares its tangent with the input, which is wrong if either is changed in "
        "place",
        reference="a copy of the result",
    )(partial(_copied, _function))
