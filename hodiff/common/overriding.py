"""Decorators that offer calls to tensor-like arguments by `__torch_function__`, as torch's own functions do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hodiff.common.running_pass import running_pass
from hodiff.common.tensor_rules import by_tensor_rule
from hodiff.torch_internals.tensors import stands_for_tensor as stands_for_tensor

F = TypeVar("F", bound=Callable[..., Any])


def is_moving(value: Any) -> bool:
    """Whether a value is tensor-like and has a derivative that only torch's functions see."""
    return getattr(type(value), "is_stand_in", False) and bool(value.is_moving())


def tensors_alone() -> AbstractContextManager[Any]:
    """Return a context for code that would treat tensor-like values as constants."""
    if torch.compiler.is_compiling():
        return nullcontext()
    running = running_pass()
    return nullcontext() if running is None else running.tensors_alone()


def offered_in_trees(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Offer a call to tensor-like leaves and to the running pass; return the result, or NotImplemented."""
    each = _stand_in(args)
    if each is None and kwargs:
        each = _stand_in(kwargs.values())
    if each is not None:
        return each.__torch_function__(function, (type(each),), args, kwargs)
    running = running_pass()
    if running is not None:
        return running.call_closing_over(function, args, kwargs)
    result = by_tensor_rule(function, args, kwargs)
    return NotImplemented if result is None else result


# Types of most leaves of trees, none of which stands for a tensor.
_ORDINARY_LEAVES = frozenset({Tensor, torch.nn.Parameter, FunctionType, int, float, bool, str, type(None)})


def _stand_in(values: Iterable[Any]) -> Any:
    """Return the first tensor-like leaf of some trees, or None."""
    for each in values:
        if type(each) in _ORDINARY_LEAVES:
            continue
        if isinstance(each, (tuple, list)):
            found = _stand_in(each)
        elif isinstance(each, dict):
            found = _stand_in(each.values())
        else:
            found = each if stands_for_tensor(each) else None
        if found is not None:
            return found
    return None


def overridable_in_trees(function: F) -> F:
    """Decorate a function of trees and functions as `overridable` does."""

    @functools.wraps(function)
    def offered(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            result = offered_in_trees(offered, args, kwargs)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    return cast(F, of_hodiff(offered))


# Types of most arguments, which are not searched for tensor-like elements.
_ORDINARY = _ORDINARY_LEAVES | {torch.Size, tuple, list}


def overridable(function: F) -> F:
    """Decorate a function so that tensor-like arguments handle its calls by `__torch_function__`."""

    @functools.wraps(function)
    def offered(*args: Any, **kwargs: Any) -> Any:
        for each in args:
            if type(each) not in _ORDINARY and stands_for_tensor(each):
                return each.__torch_function__(offered, (type(each),), args, kwargs)
        for each in kwargs.values():
            if type(each) not in _ORDINARY and stands_for_tensor(each):
                return each.__torch_function__(offered, (type(each),), args, kwargs)
        if torch.compiler.is_compiling() or (result := by_tensor_rule(offered, args, kwargs)) is None:
            return function(*args, **kwargs)
        return result

    return of_hodiff(offered)


def of_hodiff(offered: Any) -> Any:
    """Mark a function as one of hodiff's that computes a value, for the rules of tensors that it receives."""
    offered.is_of_hodiff = True
    return offered
