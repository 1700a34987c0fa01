"""Recorder of a rule's calls into torch, with their source lines."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hodiff.checks.source_lines import is_own, place
from hodiff.torch_internals.autograd.grad_mode import set_recording
from hodiff.torch_internals.operators import OpOverload, OpOverloadPacket

# Torch's names of functions that take a tensor out of the graph.
_DETACHING = {"detach", "detach_", "item", "__float__", "__int__"}
_FOREIGN = {"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"}
_METADATA = {
    *("size", "dim", "numel", "stride"),
    *("new_zeros", "new_empty", "new_ones", "zeros_like", "ones_like", "empty_like"),
    *("is_floating_point", "is_complex", "element_size", "sum_to_size"),
}
_COMPARING = {
    *("gt", "lt", "ge", "le", "eq", "ne"),
    *("__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__"),
    *("sign", "isfinite", "isnan", "signbit"),
}


@dataclass(frozen=True)
class TorchCall:
    """Call into torch.

    Attributes:
        name: Torch's name of the function.
        tensors: The tensors among its arguments.
        kind: ``"detach"``, ``"no_grad"``, ``"hook"``, ``"foreign"`` (NumPy, pointers, operators of other libraries),
            ``"metadata"``, ``"comparison"``, ``"in place"`` or ``"other"``.
        location: Line of the source.
    """

    name: str
    tensors: tuple[Tensor, ...]
    kind: str
    location: str

    def reads(self, tensor: Tensor) -> bool:
        """Whether the tensor, or a view of all of it, is among the arguments."""
        return any(each is tensor or _shares(each, tensor) for each in self.tensors)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


class TorchCalls(TorchFunctionMode):
    """Mode that records every call into torch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[TorchCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(func)
        tensors = tuple(a for a in tree_leaves((args, kwargs or {})) if isinstance(a, Tensor))
        self.steps.append(TorchCall(name, tensors, kind_of(func, args), _caller()))
        return func(*args, **(kwargs or {}))

    def of(self, *kinds: str) -> list[TorchCall]:
        """Return the steps of some kinds."""
        return [step for step in self.steps if step.kind in kinds]


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in {"__get__", "__set__"}:
        return str(getattr(func.__self__, "__name__", name))
    return "torch.no_grad" if func is set_recording else str(name)


def kind_of(func: Any, args: Any) -> str:
    """Return the kind of a call, one of those in `TorchCall`."""
    name = _name(func)
    getter = getattr(func, "__name__", "") == "__get__"
    if name in _FOREIGN or _is_foreign_operator(func):
        return "foreign"
    if name in _DETACHING or (getter and name == "data"):
        return "detach"
    if func is set_recording:
        return "no_grad" if args and args[0] is False else "metadata"
    if getter and name in {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "grad_fn"}:
        return "metadata"
    if name == "register_hook":
        return "hook"
    if name in _METADATA:
        return "metadata"
    if name in _COMPARING:
        return "comparison"
    if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
        return "in place"
    return "other"


def _is_foreign_operator(func: Any) -> bool:
    """Whether the function is an operator outside of torch's own namespaces."""
    namespace = getattr(func, "namespace", None)
    return isinstance(func, OpOverload | OpOverloadPacket) and namespace not in {None, "aten", "prims", "prim"}


def _caller() -> str:
    """Return the innermost line outside of torch; empty if it is hodiff's own."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None:
        # Frames of recording modes may lie between torch's Python code and its caller.
        if is_own(frame.f_code.co_filename) and frame.f_code.co_name != "__torch_function__":
            return ""
        # For torch's decorators, report the line of the decorated function.
        decorated = getattr(frame.f_locals.get("func"), "__code__", None)
        if frame.f_code.co_name == "decorate_context" and decorated is not None:
            return place(decorated.co_filename, decorated.co_firstlineno)
        where = place(frame.f_code.co_filename, frame.f_lineno)
        if where:
            return where
        frame = frame.f_back
    return ""
