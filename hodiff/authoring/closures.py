"""Tensors that a function uses without taking them as arguments: their gradients would be lost, so they are refused."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.errors import InputError
from hodiff.torch_internals.forward_mode import has_tangent, in_forward_mode, set_tangents
from hodiff.torch_internals.recording import set_recording
from hodiff.torch_internals.transforms import in_transform, transform_count
from hodiff.torch_internals.wrapped_tensors import below_batches, is_watched


def recorded(name: str, f: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a function of constants with recording on: a result that is recorded gives away a captured tensor.

    Args:
        name: What messages call the function.
        f: The function.
        arguments: Arguments, none of which requires a gradient.

    Returns:
        What the function returns.

    Raises:
        InputError: If a result depends on a captured tensor that requires a gradient or has a tangent.
    """
    before = torch.is_grad_enabled()
    # Transforms enter levels of forward mode too; below them, what they track is watched for otherwise.
    dual = in_forward_mode() and not in_transform()
    set_recording(True)
    try:
        if dual:
            with set_tangents(True):
                result = f(*arguments)
        else:
            result = f(*arguments)
    finally:
        set_recording(before)
    if isinstance(result, Tensor) and not dual:
        if below_batches(result).requires_grad:
            _refuse(name, _recorded_in(f, arguments))
        return result
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and (below_batches(leaf).requires_grad or (dual and has_tangent(leaf))):
            _refuse(name, _recorded_in(f, arguments))
    return result


def watched(name: str, f: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """Call a function below all transforms, where a tensor that a transform tracks can only be a captured one.

    Args:
        name: What messages call the function.
        f: The function.
        leaves: Its argument.

    Returns:
        What the function returns.
    """
    with _Watch(name):
        return f(leaves)


def refuse_captured_by(name: str, *functions: Any) -> None:
    """Look for tensors that a transform tracks in what functions close over, before the transform is left.

    Args:
        name: What messages call the function.
        *functions: Functions, partial applications, bound methods and modules; anything else is passed over.
    """
    for function in functions:
        for where, tensor in _tensors_of(function, 3):
            if is_watched(tensor):
                _refuse(name, where)


def closes_over_something(function: Any) -> bool:
    """Whether `refuse_captured_by` has anything to look at."""
    return isinstance(function, (functools.partial, types.MethodType, torch.nn.Module)) or bool(
        getattr(function, "__closure__", None)
    )


class _Watch(TorchFunctionMode):
    """Refuses operators on tensors that a transform outside the function tracks."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.below = transform_count()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        # Inside a transform that the function itself runs, its own tensors are tracked too.
        if transform_count() == self.below:
            for each in pytree.arg_tree_leaves(*args, **(kwargs or {})):
                if isinstance(each, Tensor) and is_watched(each):
                    _refuse(self.name)
        return func(*args, **(kwargs or {}))


def _refuse(name: str, where: str = "") -> NoReturn:
    which = f" ({where})" if where else ""
    raise InputError(
        f"{name}: expected every tensor with a derivative among the arguments, got one that the function closes "
        f"over{which}; pass it as an argument, as its derivative would be lost, or use its .detach()."
    )


def _tensors_of(value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if depth == 0:
        return
    if isinstance(value, functools.partial):
        yield from _tensors_of(value.func, depth)
        held = {f"argument {i}": each for i, each in enumerate(value.args)} | value.keywords
    elif isinstance(value, types.MethodType):
        yield from _tensors_of(value.__func__, depth)
        held = {"self": value.__self__}
    elif isinstance(value, torch.nn.Module):
        held = dict(value.named_parameters())
    elif isinstance(value, types.FunctionType) and value.__closure__:
        held = {
            name: cell.cell_contents
            for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True)
            if cell != _EMPTY
        }
    else:
        return
    for name, each in held.items():
        for leaf in pytree.tree_leaves(each):
            if isinstance(leaf, Tensor):
                yield name, leaf
            else:
                yield from _tensors_of(leaf, depth - 1)


_EMPTY = types.CellType()


def _recorded_in(f: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """The name of a captured tensor that requires a gradient, where it is to be found."""
    found = (where for each in (f, *arguments) for where, tensor in _tensors_of(each, 3) if tensor.requires_grad)
    return next(found, "")
