"""Calls offered to arguments that stand for tensors, by torch's protocol `__torch_function__`, as torch's own are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def stands_for_tensor(value: Any) -> bool:
    """Whether a value is no tensor, and answers torch's functions in the place of one."""
    return not isinstance(value, Tensor) and hasattr(type(value), "__torch_function__")


def overridable(function: F) -> F:
    """Let an argument that stands for a tensor say what becomes of the call; in compiled code the function refuses."""

    @functools.wraps(function)
    def offered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        for each in args:
            if type(each) is not Tensor and stands_for_tensor(each):
                return each.__torch_function__(offered, (type(each),), args, kwargs)
        for each in kwargs.values():
            if type(each) is not Tensor and stands_for_tensor(each):
                return each.__torch_function__(offered, (type(each),), args, kwargs)
        return function(*args, **kwargs)

    return cast(F, offered)
