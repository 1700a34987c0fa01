"""Errors for tensors that a callable reaches in ways that discovery misses, so that their derivatives would be lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.common.overriding import is_moving
from hodiff.errors import InputError
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_of_no_running_transform


class RefuseForeign(TorchFunctionMode):
    """Raises if an operator gets a tensor of a transform that is not running, because torch may crash or be wrong.

    Args:
        error: Returns the error for such a tensor.
        constants: Wrapped tensors that are known to be constant; operators get the tensors inside instead.
    """

    def __init__(self, error: Callable[[Tensor], Exception], constants: Sequence[Tensor] = ()):
        super().__init__()
        self.error = error
        self.constants = constants

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.constants:
            args, kwargs = pytree.tree_map_only(Tensor, self._unwrapped, (tuple(args), kwargs))
        for value in pytree.arg_tree_leaves(*args, **kwargs):
            if isinstance(value, Tensor) and (is_moving(value) or is_of_no_running_transform(value)):
                raise self.error(value)
        return function(*args, **kwargs)

    def _unwrapped(self, tensor: Tensor) -> Tensor:
        return below_transforms(tensor) if any(tensor is each for each in self.constants) else tensor


def hidden_tensor(name: str, what: Tensor | str) -> InputError:
    """Return the error for a tensor whose derivative would be lost."""
    what = f"one of shape {tuple(what.shape)}" if isinstance(what, Tensor) else what
    return InputError(
        f"{name}: f: expected every tensor that f differentiates to be an argument, a parameter of its module or "
        f"closed over, got {what} that f reaches otherwise; pass it as an argument."
    )
