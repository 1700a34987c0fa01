"""Tensors that a callable reaches by a way that nobody found: their derivatives would be lost, so they raise."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.errors import InputError
from hodiff.torch_internals.wrapped_tensors import is_of_no_running_transform


class RefuseForeign(TorchFunctionMode):
    """Raises where an operator meets a tensor of a `torch.func` transform that does not run at that point.

    torch takes such a tensor for a constant, or crashes.
    """

    def __init__(self, name: str):
        self.name = name

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and is_of_no_running_transform(value):
                raise hidden_tensor(self.name, f"one of shape {tuple(value.shape)}")
        return function(*args, **(kwargs or {}))


def hidden_tensor(name: str, what: str) -> InputError:
    """The error for a tensor whose derivative would be lost."""
    return InputError(
        f"{name}: f: expected every tensor that f differentiates to be an argument, a parameter of its module or "
        f"closed over, got {what} that f reaches otherwise; pass it as an argument."
    )
