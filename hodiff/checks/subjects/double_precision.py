"""Mode that computes in float64 where a model asks for a lower precision, so that rounding is not judged."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Dtypes that replace lower precisions.
_DOUBLE = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64) | {
    torch.complex64: torch.complex128
}
# Methods named after the precision that they convert to.
_CASTS = {
    Tensor.float: torch.float64,
    Tensor.half: torch.float64,
    Tensor.bfloat16: torch.float64,
    Tensor.cfloat: torch.complex128,  # type: ignore[attr-defined]
}


class InDouble(TorchFunctionMode):
    """Mode that reads float64 wherever a model asks for a lower precision.

    Attributes:
        places: Methods that asked for a lower precision, such as `RMSNorm.forward`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            self._note(args)
            return args[0].to(_CASTS[func])
        if _any_dtype(args) or (kwargs and _any_dtype(kwargs.values())):
            self._note(args)
            args, kwargs = tree_map_only(torch.dtype, lambda dtype: _DOUBLE.get(dtype, dtype), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        # Test the result first: it is seldom low, and reading the dtypes of all arguments takes calls, too.
        if not (
            is_low(result) if isinstance(result, Tensor) else isinstance(result, (list, tuple)) and _any_low(result)
        ):
            return result
        # Factory functions return torch's default precision.
        made = not (_any_low(args) or (kwargs and _any_low(kwargs.values())))
        return tree_map_only(Tensor, _in_double, result) if made else result

    def _note(self, args: Any) -> None:
        place = _module_code()
        if place and any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(args)):
            self.places[place] = None


def _any_dtype(leaves: Iterable[Any]) -> bool:
    """Whether a dtype is among the arguments of a call, or in their lists; faster than a pytree traversal."""
    # This runs for every torch function in a checked model, so it avoids slow generators.
    for each in leaves:
        if type(each) is torch.dtype or (isinstance(each, (list, tuple)) and torch.dtype in map(type, each)):
            return True
    return False


def _any_low(leaves: Iterable[Any]) -> bool:
    """Whether a tensor of lower precision is among the arguments of a call, or in their lists."""
    return any(is_low(each) or (isinstance(each, (list, tuple)) and any(map(is_low, each))) for each in leaves)


def is_low(leaf: Any) -> bool:
    """Whether the leaf is a tensor of a lower precision than float64."""
    return isinstance(leaf, Tensor) and leaf.dtype in _DOUBLE


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.to(_DOUBLE[tensor.dtype]) if tensor.dtype in _DOUBLE else tensor


def _module_code() -> str:
    """Return the running method of a module, such as `RMSNorm.forward`; empty if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not frame.f_globals.get("__name__", "").startswith("torch."):
            return f"{type(owner).__name__}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""
