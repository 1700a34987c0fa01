"""Calls offered to arguments that stand for tensors, by torch's protocol `__torch_function__`, as torch's own are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hodiff.torch_internals.tensors import stands_for_tensor as stands_for_tensor

F = TypeVar("F", bound=Callable[..., Any])


# What becomes of a call of a function whose functions may close over what stands for a tensor: the result, or
# NotImplemented for nothing. Filled by rooms above.
CLOSURE_WATCHERS: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = []


# Contexts in which no value that stands for a tensor may come to a function of torch. Filled by rooms above.
TENSORS_ALONE: list[Callable[[], AbstractContextManager[Any]]] = []


# Whether what stands for a tensor has a derivative where it is asked. Filled by rooms above.
MOVING: list[Callable[[Any], bool]] = []


def is_moving(value: Any) -> bool:
    """Whether a value stands for a tensor and has a derivative that only torch's functions see."""
    return stands_for_tensor(value) and any(moving(value) for moving in MOVING)


def tensors_alone() -> AbstractContextManager[Any]:
    """The context of code that would take what stands for a tensor for a constant."""
    if torch.compiler.is_compiling():
        return nullcontext()
    for made in TENSORS_ALONE:
        return made()
    return nullcontext()


def offered_in_trees(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of whoever takes a call of trees of tensors and of functions, or NotImplemented."""
    for each in _leaves((args, kwargs)):
        if stands_for_tensor(each):
            return each.__torch_function__(function, (type(each),), args, kwargs)
    for watch in CLOSURE_WATCHERS:
        result = watch(function, args, kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _leaves(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _leaves(each)
    elif type(tree) is not Tensor:
        yield tree


def overridable_in_trees(function: F) -> F:
    """As `overridable`, of a function that takes trees and functions."""

    @functools.wraps(function)
    def offered(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            result = offered_in_trees(offered, args, kwargs)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    return cast(F, offered)


def overridable(function: F) -> F:
    """Let an argument that stands for a tensor say what becomes of the call."""

    @functools.wraps(function)
    def offered(*args: Any, **kwargs: Any) -> Any:
        for each in args:
            if type(each) is not Tensor and stands_for_tensor(each):
                return each.__torch_function__(offered, (type(each),), args, kwargs)
        for each in kwargs.values():
            if type(each) is not Tensor and stands_for_tensor(each):
                return each.__torch_function__(offered, (type(each),), args, kwargs)
        return function(*args, **kwargs)

    return cast(F, offered)
