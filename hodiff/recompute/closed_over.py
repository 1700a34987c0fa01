"""The tensors that a callable reads without being given them, and other tensors put in their place.

A Function differentiates nothing but its operands. Parameters of a module and tensors in closures become operands by
being found, in closure cells, defaults, partial arguments, attributes, containers and the globals that the code names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hodiff.common.buffers import exchanged_buffers
from hodiff.torch_internals.forward_mode import has_tangent
from hodiff.torch_internals.modules import RunningNorm, buffers_by_name
from hodiff.torch_internals.tensors import version_of
from hodiff.torch_internals.wrapped_tensors import is_wrapped

# Globals of their functions hold nothing of the user's.
_LIBRARIES = {"torch", "hodiff", "numpy", "scipy", "functools", "builtins"}
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    ModuleType,
    BuiltinFunctionType,
    CodeType,
    np.ndarray,
    torch.dtype,
    torch.device,
    torch.Size,
)


@dataclass(frozen=True)
class _Reference:
    """Stands for the tensor at a position."""

    index: int


@dataclass
class _Slot:
    """A place that can be read and written, and what it held when it was found, with references for tensors."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    content: Any


class _Buffer:
    """A module's buffer as it was before the first run, kept if that run changes it."""

    def __init__(self, owner: dict[str, Any], name: str, silent: bool):
        self.owner, self.name, self.silent = owner, name, silent
        self.tensor: Tensor = owner[name]
        self.version = version_of(self.tensor)
        self.before = self.tensor.clone()

    @property
    def changed(self) -> bool:
        return self.silent or self.owner.get(self.name) is not self.tensor or version_of(self.tensor) != self.version


class ClosedOver:
    """What a callable closes over.

    Attributes:
        generators: The `torch.Generator` objects among it.
    """

    def __init__(self, *roots: Any):
        self.generators: list[torch.Generator] = []
        self._slots: list[_Slot] = []
        self._buffers: list[_Buffer] = []
        self._tensors: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._ran = False
        self._walk(roots)

    def take(self) -> list[Tensor]:
        """Hand over the tensors, in the order in which `filled` wants them; they are not kept here."""
        tensors, self._tensors = self._tensors, []
        self._index = {}
        return tensors

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Put tensors in the places of those that were found, for the time of one run.

        The first run is the one whose side effects stay: what it rebinds stays bound and buffers that it updates stay
        updated. Later runs start from the same buffers and leave no trace.

        Args:
            tensors: One for each that `take` gave.

        Yields:
            Nothing.
        """
        first, self._ran = not self._ran, True
        replaced = []
        try:
            for slot in self._slots:
                placed = _filled(slot.content, tensors)
                replaced.append((slot, slot.get(), placed))
                slot.set(placed)
            if first:
                yield
            else:
                with exchanged_buffers([(each.owner, each.name, each.before.clone()) for each in self._buffers]):
                    yield
        finally:
            for slot, held, placed in reversed(replaced):
                if not first or slot.get() is placed:
                    slot.set(held)
            if first:
                self._buffers = [buffer for buffer in self._buffers if buffer.changed]
                for buffer in self._buffers:
                    del buffer.tensor

    def _walk(self, roots: Sequence[Any]) -> None:
        for value in reachable(*roots):
            if isinstance(value, torch.Generator):
                self.generators.append(value)
            if isinstance(value, nn.Module) and value.training:
                self._keep_buffers(value)
            for get, set_, snapshot in _places(value):
                held = get()
                content = self._referenced(held)
                # Cells are kept whatever they hold: a loop may have bound them anew by the time of the next run.
                if snapshot or content is not held:
                    self._slots.append(_Slot(get, set_, content))

    def _keep_buffers(self, module: nn.Module) -> None:
        # torch.batch_norm updates its running statistics without counting it as a change.
        silent = isinstance(module, RunningNorm)
        for name, tensor in (buffers := buffers_by_name(module)).items():
            if isinstance(tensor, Tensor) and is_constant(tensor) and not tensor.is_inference():
                self._buffers.append(_Buffer(buffers, name, silent))
                self._index[id(tensor)] = -1

    def _referenced(self, value: Any) -> Any:
        """The value with references in place of tensors; itself where it has none."""
        if isinstance(value, Tensor):
            index = self._index.setdefault(id(value), len(self._tensors))
            if index < 0:
                return value
            if index == len(self._tensors):
                self._tensors.append(value)
            return _Reference(index)
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            parts = [self._referenced(part) for part in value]
            if any(a is not b for a, b in zip(parts, value, strict=True)):
                return _like(value, parts)
        return value


def reachable(*roots: Any) -> Iterator[Any]:
    """Walk what a callable closes over.

    Args:
        *roots: Where to begin.

    Yields:
        Each object that may hold a tensor, once; tensors themselves are not among them.
    """
    seen: dict[int, Any] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        if isinstance(value, (*_ATOMS, Tensor)) or id(value) in seen:
            continue
        # The reference keeps the identity from being used again.
        seen[id(value)] = value
        yield value
        if not isinstance(value, torch.Generator):
            stack.extend(get() for get, _, _ in _places(value))
            stack.extend(_parts(value))


def is_constant(tensor: Tensor) -> bool:
    """Whether no derivative can run through a tensor: it is no part of a graph, a transform or a dual number."""
    return not (tensor.requires_grad or is_wrapped(tensor) or has_tangent(tensor))


def _filled(content: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(content, _Reference):
        return tensors[content.index]
    if isinstance(content, tuple):
        parts = [_filled(part, tensors) for part in content]
        if any(a is not b for a, b in zip(parts, content, strict=True)):
            return _like(content, parts)
    return content


def _like(model: tuple[Any, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(parts) if type(model) is tuple else type(model)(*parts)


Place = tuple[Callable[[], Any], Callable[[Any], None], bool]


def _places(value: Any) -> Iterator[Place]:
    """The places in an object where tensors can be exchanged, and whether each is a cell."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            if not _is_empty(cell):
                yield partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"), True
        if value.__defaults__:
            yield partial(getattr, value, "__defaults__"), partial(setattr, value, "__defaults__"), False
        if not _is_library(value.__globals__):
            named = _names(value.__code__)
            yield from _entries(value.__globals__, [name for name in named if name in value.__globals__])
    elif isinstance(value, partial):
        yield (lambda: value.args), partial(_set_partial_arguments, value), False
    elif isinstance(value, dict):
        yield from _entries(value, list(value))
    elif isinstance(value, list):
        yield from _entries(value, range(len(value)))
    else:
        for name in _slot_names(type(value)):
            if hasattr(value, name):
                yield partial(getattr, value, name), partial(object.__setattr__, value, name), False


def _is_library(namespace: dict[str, Any]) -> bool:
    name = namespace.get("__name__", "")
    return name.partition(".")[0] in _LIBRARIES and getattr(sys.modules.get(name), "__dict__", None) is namespace


def _entries(container: Any, keys: Sequence[Any]) -> Iterator[Place]:
    for key in keys:
        if not isinstance(container[key], _ATOMS):
            yield partial(container.__getitem__, key), partial(container.__setitem__, key), False


def _parts(value: Any) -> Iterator[Any]:
    """Further objects that an object holds."""
    if isinstance(value, FunctionType):
        yield value.__kwdefaults__
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, partial):
        yield value.func
        yield value.keywords
    elif isinstance(value, (tuple, set, frozenset)):
        yield from value
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield attributes


def _names(code: CodeType) -> Iterator[str]:
    """Names that the code, and the functions defined in it, may look up among the globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _slot_names(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


def _is_empty(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _set_partial_arguments(function: partial[Any], arguments: tuple[Any, ...]) -> None:
    function.__setstate__((function.func, arguments, function.keywords, function.__dict__))  # type: ignore[attr-defined]
