"""Rules for operators on lists of tensors, which torch's optimizers and gradient clipping use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.mode import Corrections
from hodiff.corrections.mechanism.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.operators import foreach_by_name

_LOST = "forward mode drops the tangent of the second argument, if it is a single tensor"
_ABSENT = "if the second argument is a single tensor, reverse mode raises an error"
_OTHER_SIDE = "with a number, forward mode selects the tangent of the wrong operand"
_KINKS = "as `torch.clamp`"
_TAILS = "derivatives round to zero if the value rounds to its limit"
_UNSEEN = "torch.func does not detect that it changes tensors saved for the backward pass"

# Keyword names of the other operands in torch.
_OTHERS = ("other", "exponent", "src", "tensor1", "tensors1", "tensor2", "weight", "weights", "scalar", "scalars")


def _extreme(function: Callable[..., Tensor], x: Tensor, other: Tensor | float) -> Tensor:
    return function(x, other if isinstance(other, Tensor) else x.new_tensor(other))


def _norm(x: Tensor, ord: float = 2, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


_maximum, _minimum = partial(_extreme, torch.maximum), partial(_extreme, torch.minimum)


def _with_numbers(function: Callable[..., Tensor], x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return function(x, a, b, value=value)


# Single-tensor functions that torch does not have under that name.
_ONE: dict[str, Callable[..., Tensor]] = {
    "addcdiv_": partial(_with_numbers, Tensor.addcdiv_),
    "addcmul_": partial(_with_numbers, Tensor.addcmul_),
    "maximum": _maximum,
    "maximum_": lambda x, other: x.copy_(_maximum(x.clone(), other)),
    "minimum": _minimum,
    "minimum_": lambda x, other: x.copy_(_minimum(x.clone(), other)),
    "norm": _norm,
}
# Faults of the operators that are not in place.
_REASONS = {
    "add": _LOST,
    "maximum": _OTHER_SIDE,
    "minimum": _OTHER_SIDE,
    "mul": _ABSENT,
    "div": _ABSENT,
    "clamp_max": _KINKS,
    "clamp_min": _KINKS,
    "norm": "forward mode is not implemented",
    "pow": "forward mode is not implemented if the base is a number, and not finite at base 0",
    "sub": "for real tensors and a complex number, tangents of forward mode are real",
    "sigmoid": _TAILS,
    "tanh": _TAILS,
}
_MISSING = {"mul", "div", "norm", "pow"}


def _each(one: Callable[..., Tensor], self: Sequence[Tensor], *others: Any, **options: Any) -> Any:
    """Apply a single-tensor function to every tensor of a list, with hodiff's rules."""
    others = (*others, *(options.pop(name) for name in _OTHERS if name in options))
    # After two lists, a tensor is a row of numbers, which are refused if they carry derivatives.
    others = tuple(each.unbind() if i == 2 and isinstance(each, Tensor) else each for i, each in enumerate(others))
    lists = [each for each in others if isinstance(each, (list, tuple))]
    if not self or any(len(each) != len(self) for each in lists):
        return INVALID
    numbers = [each for each in others if isinstance(each, Tensor)]
    if not may_be_differentiated([*self, *numbers, *chain.from_iterable(lists)]):
        return UNNEEDED
    with Corrections():
        return tuple(one(x, *_at(i, others), **options) for i, x in enumerate(self))


def _each_in_place(one: Callable[..., Tensor], self: Sequence[Tensor], *others: Any, **options: Any) -> Any:
    """Apply an in-place function to every tensor of a list, and return the list."""
    result = _each(one, self, *others, **options)
    return self if isinstance(result, tuple) else result


def _at(i: int, others: Sequence[Any]) -> list[Any]:
    """Return the operands of the tensor at index i: the element of a list, or an operand that all tensors share."""
    return [other[i] if isinstance(other, (list, tuple)) else other for other in others]


def _pow(self: Sequence[Tensor] | float, exponent: Any) -> Any:
    """Raise a list to one or many exponents, or a number to a list of exponents."""
    if isinstance(self, (list, tuple)):
        return _each(torch.pow, self, exponent)
    return _each(lambda x, base: torch.pow(base, x), exponent, self)


def _rule(name: str) -> Callable[..., Any]:
    if name == "pow":
        return _pow
    one = _ONE.get(name) or getattr(Tensor, name)
    return partial(_each_in_place if name.endswith("_") else _each, one)


for _name, _operator in foreach_by_name().items():
    register(
        _operator,
        kind="missing" if _name in _MISSING else "wrong",
        routes=ROUTES if _name in _MISSING else ROUTES[1:],
        reason=_REASONS.get(_name, _UNSEEN),
        reference="the function of one tensor, for each tensor",
    )(_rule(_name))
