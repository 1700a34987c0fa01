"""Rules for operators on lists of tensors, by which torch's optimizers and clipping of gradients compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED
from hodiff.corrections.mode import Corrections
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.differentiation import may_be_differentiated
from hodiff.torch_internals.operators import foreach

_LOST = "forward mode drops the tangent of a tensor that all are taken with"
_ABSENT = "of a tensor that all are taken with, reverse mode raises"
_OTHER_SIDE = "by a number, forward mode takes the tangent of the other side"

# What torch calls that which the tensors are taken with.
_OTHERS = ("other", "scalar", "scalars")


def _extreme(function: Callable[..., Tensor], x: Tensor, other: Tensor | float) -> Tensor:
    return function(x, other if isinstance(other, Tensor) else x.new_tensor(other))


def _norm(x: Tensor, ord: float = 2, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


_maximum, _minimum = partial(_extreme, torch.maximum), partial(_extreme, torch.minimum)

# The function of one tensor, what is amiss with that of lists, and by which routes it is wrong.
_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], str, tuple[str, ...]]] = {
    "add": (torch.add, _LOST, ROUTES[1:]),
    "add_": (Tensor.add_, _LOST, ROUTES[1:]),
    "maximum": (_maximum, _OTHER_SIDE, ROUTES[1:]),
    "maximum_": (lambda x, other: x.copy_(_maximum(x.clone(), other)), _OTHER_SIDE, ROUTES[1:]),
    "minimum": (_minimum, _OTHER_SIDE, ROUTES[1:]),
    "minimum_": (lambda x, other: x.copy_(_minimum(x.clone(), other)), _OTHER_SIDE, ROUTES[1:]),
    "mul": (torch.mul, _ABSENT, ()),
    "div": (torch.div, _ABSENT, ()),
    "norm": (_norm, "forward mode is not implemented", ()),
}


def _each(one: Callable[..., Tensor], self: Sequence[Tensor], *others: Any, **options: Any) -> Any:
    """One by one, with the rules that there are for one."""
    others = (*others, *(options.pop(name) for name in _OTHERS if name in options))
    lists = [each for each in others if isinstance(each, (list, tuple))]
    if not self or any(len(each) != len(self) for each in lists):
        return INVALID
    numbers = [each for each in others if isinstance(each, Tensor)]
    if not may_be_differentiated([*self, *numbers, *chain.from_iterable(lists)]):
        return UNNEEDED
    with Corrections():
        return tuple(one(x, *_at(i, others), **options) for i, x in enumerate(self))


def _each_in_place(one: Callable[..., Tensor], self: Sequence[Tensor], *others: Any, **options: Any) -> Any:
    """One by one; what comes back is the list itself."""
    result = _each(one, self, *others, **options)
    return self if isinstance(result, tuple) else result


def _at(i: int, others: Sequence[Any]) -> list[Any]:
    """What goes with one tensor: its own, or what all have in common."""
    return [other[i] if isinstance(other, (list, tuple)) else other for other in others]


for name, (one, reason, routes) in _FUNCTIONS.items():
    rule = partial(_each_in_place if name.endswith("_") else _each, one)
    register(
        foreach(name),
        kind="wrong" if routes else "missing",
        routes=routes or ROUTES,
        reason=reason,
        reference="the function of one tensor, one by one",
    )(rule)
