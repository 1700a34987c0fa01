"""Writes to remembered tensors $E + O n$, in place, by the functions that return new tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.rules.distances.graded import UNARY
from hodiff.corrections.rules.distances.length_calls import Call, tensors_in
from hodiff.corrections.rules.distances.lengths import find, remember
from hodiff.corrections.rules.distances.linear import linear


@cache
def place_of_option(func: Any) -> int | None:
    """Position of the option `inplace` of a function in `torch.nn.functional`, which is its last one."""
    parameters = getattr(getattr(func, "__code__", None), "co_varnames", ())
    return parameters.index("inplace") if "inplace" in parameters else None


def out_of_place(name: str) -> Callable[..., Any] | None:
    """Return the function that an in-place function writes, if it has a rule."""
    plain = name.removesuffix("_")
    if name in _IN_PLACE or not name.endswith("_") or plain not in UNARY or plain.startswith("_"):
        return _IN_PLACE.get(name)
    return getattr(Tensor, plain, None) or getattr(F, plain, None)


def write_result(call: Call, function: Callable[..., Any]) -> Any:
    """Compute the value out of place, write it, and record its parity for the tensor written to."""
    x = call.args[0]
    # The overwritten value may be a factor in the parity, and a graph may keep it. Its parity must not refer to x.
    before = x.clone()
    if (graded := call.graded(0)) is not None:
        held = tuple(each for each, _ in graded.held)
        remember(before, graded.root, graded.even, graded.odd, graded.length, held)
    args, kwargs = pytree.tree_map_only(Tensor, lambda each: before if each is x else each, (call.args, call.kwargs))
    kwargs.pop("inplace", None)
    value = call.again(function, *args, **kwargs)
    return _copied(x, value)


def _copied(x: Tensor, value: Tensor) -> Tensor:
    """Write a value to a tensor, and remember its parity for the tensor."""
    result = find(value)
    x.copy_(value)
    if result is not None:
        length = value if result.length is None else result.length
        remember(x, result.root, result.even, result.odd, length, tuple(each for each, _ in result.held))
    return x


def write_tensors(call: Call, function: Callable[..., Any]) -> Any:
    """Write to a tensor what the out-of-place function returns; None if torch's own function is right."""
    if all(call.zeros(each) is None for each in tensors_in(call.args, call.kwargs) if id(each) in call.found):
        return None
    x = call.args[0]
    before = x.clone()  # a graph may keep the overwritten value
    found = call.found | ({id(before): call.found[id(x)]} if id(x) in call.found else {})
    result = linear(replace(call, args=(before, *call.args[1:]), found=found), function)
    return None if result is None else _copied(x, result)


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    result = x.clone()
    result[index] = value
    return result


# Functions that write other tensors to their first argument.
WRITES: dict[str, Callable[..., Any]] = {
    "__setitem__": _set,
    "copy_": lambda x, other, *_: other.to(x.dtype).expand(x.shape),
    **{
        f"{name}_": getattr(Tensor, name) for name in ("index_add", "index_copy", "index_put", "scatter", "scatter_add")
    },
}
_IN_PLACE: dict[str, Callable[..., Any]] = {
    **{f"{name}_": getattr(Tensor, name) for name in ("mul", "div", "add", "sub", "neg")},
    **{f"__i{name[2:]}": getattr(Tensor, name) for name in ("__mul__", "__truediv__", "__add__", "__sub__", "__pow__")},
}
