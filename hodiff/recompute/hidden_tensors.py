"""Tensors that a callable reaches by a way that nobody found: their derivatives would be lost, so they raise."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _functorch as functorch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.errors import InputError


class RefuseForeign(TorchFunctionMode):
    """Raises where an operator meets a tensor of a `torch.func` transform that does not run at that point.

    torch takes such a tensor for a constant, or crashes.
    """

    def __init__(self, name: str):
        self.name = name

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _is_foreign(value):
                raise hidden_tensor(self.name, f"one of shape {tuple(value.shape)}")
        return function(*args, **(kwargs or {}))


def _is_foreign(tensor: Tensor) -> bool:
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return False
    running = {each.level(): each.key() for each in functorch.get_interpreter_stack() or ()}
    while functorch.is_functorch_wrapped_tensor(tensor):
        level = functorch.maybe_get_level(tensor)
        if level < 0:  # of a transform that has ended: a constant to everyone
            return False
        is_batched = functorch.is_batchedtensor(tensor)
        if level not in running or is_batched != (running[level] == functorch.TransformType.Vmap):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def hidden_tensor(name: str, what: str) -> InputError:
    """The error for a tensor whose derivative would be lost."""
    return InputError(
        f"{name}: f: expected every tensor that f differentiates to be an argument, a parameter of its module or "
        f"closed over, got {what} that f reaches otherwise; pass it as an argument."
    )
