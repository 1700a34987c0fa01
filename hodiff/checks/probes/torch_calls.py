"""What a rule does to tensors, call by call, and on which line of the source."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hodiff.checks.source_lines import is_own, place
from hodiff.torch_internals.autograd.recording import set_recording
from hodiff.torch_internals.operators import OpOverload, OpOverloadPacket

# What takes a tensor out of the graph, by torch's own name for it.
_DETACHING = {"detach", "detach_", "item", "__float__", "__int__"}
_FOREIGN = {"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"}
_METADATA = {
    "size",
    "dim",
    "numel",
    "stride",
    "new_zeros",
    "new_empty",
    "new_ones",
    "zeros_like",
    "ones_like",
    "empty_like",
    "is_floating_point",
    "is_complex",
    "element_size",
    "sum_to_size",
}
_COMPARING = {
    "gt",
    "lt",
    "ge",
    "le",
    "eq",
    "ne",
    "__gt__",
    "__lt__",
    "__ge__",
    "__le__",
    "__eq__",
    "__ne__",
    "sign",
    "isfinite",
    "isnan",
    "signbit",
}


@dataclass(frozen=True)
class TorchCall:
    """One call into torch.

    Attributes:
        name: Torch's name of what was called.
        tensors: The tensors among its arguments.
        kind: ``"detach"``, ``"no_grad"``, ``"hook"``, ``"foreign"`` (NumPy, pointers, operators of others),
            ``"metadata"``, ``"comparison"``, ``"in place"`` or ``"other"``.
        location: Where.
    """

    name: str
    tensors: tuple[Tensor, ...]
    kind: str
    location: str

    def reads(self, tensor: Tensor) -> bool:
        """Whether a tensor, or a view of all of it, is among the arguments."""
        return any(each is tensor or _shares(each, tensor) for each in self.tensors)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


class TorchCalls(TorchFunctionMode):
    """Records every call into torch while it is entered."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.steps: list[TorchCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call, and make it."""
        name = _name(func)
        tensors = tuple(a for a in tree_leaves((args, kwargs or {})) if isinstance(a, Tensor))
        self.steps.append(TorchCall(name, tensors, kind_of(func, args), _caller()))
        return func(*args, **(kwargs or {}))

    def of(self, *kinds: str) -> list[TorchCall]:
        """The steps of some kinds."""
        return [step for step in self.steps if step.kind in kinds]


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in {"__get__", "__set__"}:
        return str(getattr(func.__self__, "__name__", name))
    return "torch.no_grad" if func is set_recording else str(name)


def kind_of(func: Any, args: Any) -> str:
    """What a call does, in a word of `TorchCall`."""
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
    """An operator that someone registered with torch.library, with nothing for autograd to see."""
    namespace = getattr(func, "namespace", None)
    return isinstance(func, OpOverload | OpOverloadPacket) and namespace not in {
        None,
        "aten",
        "prims",
        "prim",
    }


def _caller() -> str:
    """The innermost line that is not torch's; none if it is hodiff's own, which is no one's fault."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None:
        # Modes that watch stand between what torch writes in Python and its caller.
        if is_own(frame.f_code.co_filename) and frame.f_code.co_name != "__torch_function__":
            return ""
        # A decorator of torch's calls what it decorates, whose own line is the one to see.
        decorated = getattr(frame.f_locals.get("func"), "__code__", None)
        if frame.f_code.co_name == "decorate_context" and decorated is not None:
            return place(decorated.co_filename, decorated.co_firstlineno)
        where = place(frame.f_code.co_filename, frame.f_lineno)
        if where:
            return where
        frame = frame.f_back
    return ""
