"""Checks for captured tensors: a rule would lose the gradients of tensors that its function closes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.overriding import is_moving
from hodiff.errors import InputError
from hodiff.recompute.reachable import RefuseForeign, named_tensors
from hodiff.torch_internals.autograd.differentiation import is_observed
from hodiff.torch_internals.autograd.grad_mode import has_tangent, in_forward_mode, set_recording, set_tangents
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import below_batches, is_watched


def recorded(name: str, f: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a function on constants with recording on; raise if the result is recorded: a tensor was captured."""
    before = torch.is_grad_enabled()
    # Transforms enter forward-mode levels, too; `watched` looks for the tensors that they track.
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
            raise _closed_over(name, _recorded_in(f, arguments))
        return result
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and (below_batches(leaf).requires_grad or (dual and has_tangent(leaf))):
            raise _closed_over(name, _recorded_in(f, arguments))
    return result


def watched(name: str, f: Callable[..., Any], leaves: Sequence[Any], constants: Sequence[Tensor] = ()) -> Any:
    """Call a function below all transforms; raise if it uses a tensor of a transform, except `constants`."""
    with RefuseForeign(lambda _: _closed_over(name), constants):
        return f(leaves)


def refuse_captured_by(name: str, *functions: Any) -> None:
    """Raise if a function closes over a tensor that a transform tracks; call it inside the transform."""
    for function in functions:
        for where, tensor in named_tensors(function):
            if is_watched(tensor) or is_moving(tensor):
                raise _closed_over(name, where)


def captured_constants(name: str, *functions: Any) -> list[Tensor]:
    """Return tensors of a transform that functions close over; raise if they have a derivative or a batch."""
    found = []
    for function in functions:
        for where, tensor in named_tensors(function):
            if is_observed(tensor) or is_moving(tensor):
                raise _closed_over(name, where)
            if is_watched(tensor):
                found.append(tensor)
    return found


def _closed_over(name: str, where: str = "") -> InputError:
    which = f" ({where})" if where else ""
    return InputError(
        f"{name}: expected every tensor with a derivative among the arguments, got one that the function closes "
        f"over{which}; pass it as an argument, as its derivative would be lost, or use its .detach()."
    )


def _recorded_in(f: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Name of a captured tensor that requires a gradient, or an empty string if none is found."""
    found = (where for each in (f, *arguments) for where, tensor in named_tensors(each) if tensor.requires_grad)
    return next(found, "")
