"""Calls that forward mode would silently differentiate wrongly: tensors in place of numbers, and `no_grad` blocks.

Torch reads the values of tensors that are passed for numbers, and forward mode would silently lose the tangents.
"""

from __future__ import annotations

import functools
import inspect
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.mechanism.registry import Correction, name_of
from hodiff.errors import RouteError
from hodiff.torch_internals.autograd.differentiation import is_observed
from hodiff.torch_internals.autograd.grad_mode import CONSTANTS, set_recording
from hodiff.torch_internals.autograd.transforms import differentiating_count
from hodiff.torch_internals.operators import number_places, operator_named

# Functions whose results are not detached: the switch itself, and the getter of an existing tensor. (mypy takes
# Tensor.grad and Tensor.data for tensors, while on the class they are descriptors.)
_KEPT = frozenset({set_recording, Tensor.grad.__get__})  # type: ignore[union-attr]


def makes_constants(function: Any) -> bool:
    """Whether the result of a call is constant to all transforms outside the block."""
    depth = CONSTANTS.depth
    if depth is None or depth != differentiating_count() or function in _KEPT:
        return False
    if torch.is_grad_enabled():
        # A function switched recording off and never on again; torch has restored the outer state.
        CONSTANTS.depth = None
        return False
    return True


def as_constants(result: Any, arguments: Any) -> Any:
    """Detach the tensors in a result, except arguments that are returned, such as those written in place."""
    given = {id(each) for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)}
    return pytree.tree_map_only(Tensor, lambda each: each if id(each) in given else each.detach(), result)


# Index or name of an argument, with its name.
Places = dict[int | str, str]


def moving_number(function: Any, correction: Correction | None, args: Any, kwargs: Any) -> str:
    """Return the name of a number that is given as a tensor with a tangent in forward mode, or ""."""
    places = _places(function) if correction is None else _places_of_both(function, correction.rule)
    if places:
        for place, value in chain(enumerate(args), kwargs.items()):
            if place in places and isinstance(value, Tensor) and not value.dim() and is_observed(value):
                return places[place]
    return ""


def refused(function: Any, name: str) -> RouteError:
    """Return the error for a tensor given as a number; in reverse mode torch raises its own."""
    return RouteError(
        f"{name_of(function)}: {name}: expected a number, got a 0-d tensor that forward mode differentiates. Torch "
        f"reads the number and drops its tangent, so derivatives would be 0. Write the formula explicitly, such as a "
        f"* x for alpha=a; use only reverse mode, which is right or raises an error; or pass "
        f"{name}.item() for a constant."
    )


@functools.cache
def _places(function: Any) -> Places:
    """Return the number arguments of a torch function, by its annotations or its operator's signatures."""
    if isinstance(function, FunctionType):
        return _annotated(function)
    operator = operator_named(getattr(function, "__name__", ""))
    return {} if operator is None else number_places(operator)


@functools.cache
def _places_of_both(function: Any, rule: Any) -> Places:
    """Return the number arguments of the function and the rule, without the rule's tensor arguments."""
    parameters = _parameters(rule)
    tensors = {each.name for each in parameters if "Tensor" in str(each.annotation)}
    places = {**_places(function), **_annotated(rule)}
    return {place: name for place, name in places.items() if name not in tensors}


def _annotated(function: Any) -> Places:
    """Return the parameters that are annotated as real numbers only."""
    places: Places = {}
    for i, each in enumerate(_parameters(function)):
        kind = each.annotation if isinstance(each.annotation, str) else inspect.formatannotation(each.annotation)
        if "float" in kind and "Tensor" not in kind:
            places[each.name] = each.name
            if each.kind is not each.KEYWORD_ONLY:
                places[i] = each.name
    return places


def _parameters(function: Any) -> tuple[inspect.Parameter, ...]:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()
