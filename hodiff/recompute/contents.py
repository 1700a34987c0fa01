"""The contents of objects: read to distinguish states, and read again to see whether they have changed.

Comparison of the values of several evaluations of one function.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.trees import tensors_in
from hodiff.errors import InputError
from hodiff.recompute.names_in_code import names_in
from hodiff.recompute.reachable import cells_of, is_users, slot_names
from hodiff.rules.autocast import autocast_dtype
from hodiff.torch_internals.autograd.transforms import outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_internals.custom_operators import CustomOpDef
from hodiff.torch_internals.operators import OpOverload, OpOverloadPacket

# Number of rounding units of 16 bits by which values may differ: transforms run other kernels.
_ROUNDED = 4


def numbers_in(values: Any) -> list[Tensor]:
    """Unwrap the tensors in a pytree from all transforms, and detach them."""
    with outside_transforms():  # where a detached tensor is wrapped by none
        return [below_transforms(each).detach() for each in tensors_in(values)]


def require_same(
    caller: str, first: Sequence[Tensor], again: Sequence[Tensor], coarsest: Callable[[], float] | None = None
) -> None:
    """Raise if values differ from the first by more than rounding, of the dtype whose epsilon `coarsest` returns."""
    with outside_transforms():
        for one, other in zip(first, again, strict=False):
            # Tensors of other types need not have numbers.
            if type(other) is not Tensor or same(one, other) or (coarsest and same(one, other, coarsest())):
                continue
            raise _unsteady(caller, one, other)


def same(one: Tensor, other: Tensor, eps: float = 0.0) -> bool:
    """Whether two tensors are equal up to the rounding of another order or formula, and of a dtype with `eps`."""
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape
    # Threads and forward mode round differently, and cancellation magnifies it. Random numbers differ by far more.
    lowered = _ROUNDED * max(eps, _lowered_eps(one.device.type))
    tolerance = max(torch.finfo(one.dtype).eps ** 0.6, lowered)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _lowered_eps(device: str) -> float:
    """Return the rounding unit of the dtype of `torch.autocast`, within which kernels and rules may differ."""
    dtype = autocast_dtype(device)
    return 0.0 if dtype is None else torch.finfo(dtype).eps


def difference(one: Tensor, other: Tensor) -> str:
    """Describe how two tensors of one shape differ."""
    if one.numel() == 1:
        return f"{one.item():.6g} and {other.item():.6g}, {abs(one.item() - other.item()):.1e} apart"
    return f"outputs that differ by up to {(one - other).abs().max().item():.2g}"


def _unsteady(caller: str, one: Tensor, other: Tensor) -> InputError:
    return InputError(
        f"{caller}: f: expected the same value in each call, because it is called again for each group of directions "
        f"or each product, got {difference(one, other)}; look for random numbers (model.eval(), randomness='same', a "
        f"seed that "
        "f sets itself) and for state that changes in between, or take the route 'reverse-over-reverse' (for a "
        "Jacobian, the mode 'reverse'), which evaluates f once."
    )


# Constants that are identified by their representation, by their value, or by identity.
_NUMBERS = (bool, int, float, complex, type(None), np.generic)
_HASHED = (str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_OPERATORS = (OpOverload, OpOverloadPacket, CustomOpDef)
_SINGLE = (Enum, ModuleType, BuiltinFunctionType, CodeType, torch.Generator, *_OPERATORS)
# The state of these modules' objects does not affect computations, and changes all the time.
_OPAQUE = {"logging", "threading", "_thread", "_weakref", "weakref", "typing", "io", "_io", "tqdm"}
_MISSING = object()
CONTAINERS = (dict, list, tuple, set, frozenset, deque)

Reader = Callable[[], Iterable[Any]]


class Same:
    """A key for an object by identity; it holds the object, so that its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Contents:
    """Places, and the objects that they held.

    Args:
        containers: Dicts and lists.
        readers: Functions that read further places.
        arrays: NumPy arrays, which are compared by their numbers.
    """

    def __init__(
        self, containers: Sequence[Any], readers: Sequence[Reader], arrays: Sequence[np.ndarray[Any, Any]] = ()
    ):
        # `hold` runs at each call of compiled code, so it avoids a Python loop over the many dicts of modules.
        filled = [each for each in containers if elements(each)]
        self._dicts = [each for each in filled if isinstance(each, dict)]
        self._lists = [(kind_of(each), each) for each in filled if not isinstance(each, dict)]
        self._empty = [(kind_of(each), each) for each in containers if not elements(each)]
        self._readers = readers
        self._seen = self._read()
        self._arrays = [(each, _numbers(each)) for each in arrays]

    def hold(self) -> bool:
        """Whether all places still hold the same objects."""
        if any(kind.__len__(each) for kind, each in self._empty):
            return False
        now = self._read()
        return (
            len(now) == len(self._seen)
            and all(map(is_, now, self._seen))
            and all(_numbers(array) == before for array, before in self._arrays)
        )

    def _read(self) -> list[Any]:
        return [
            *chain.from_iterable(map(dict.keys, self._dicts)),
            *chain.from_iterable(map(dict.values, self._dicts)),
            *chain.from_iterable(kind.__iter__(each) for kind, each in self._lists),
            *chain.from_iterable(read() for read in self._readers),
        ]


def kind_of(container: Any) -> Any:
    """Return the container type of Python that a container is an instance of."""
    return next(kind for kind in CONTAINERS if isinstance(container, kind))


def elements(container: Any) -> list[Any]:
    """Return a container's elements, bypassing overrides of a subclass, which may create elements or import modules."""
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    return [*kind_of(container).__iter__(container)]


def constant_form(value: Any) -> Any:
    """Return a key that identifies a constant; None for values that hold other objects."""
    if isinstance(value, _SINGLE):
        return Same(value)
    if isinstance(value, _NUMBERS):
        return type(value), repr(value)
    if isinstance(value, _HASHED):
        return type(value), value
    if isinstance(value, type) and not is_users(value.__module__):
        return Same(value)
    return None


def content_of(value: Any) -> tuple[Any, list[Any], list[Reader], list[Any]]:
    """Return an object's kind, the containers and readers of its content, and the objects inside it."""
    if isinstance(value, np.ndarray):
        return ("array", Same(value) if value.dtype.hasobject else _numbers(value)), [], [], []
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, type):
        return _class(value)
    if isinstance(value, MethodType):
        return "method", [], [], [value.__func__, value.__self__]
    if isinstance(value, (tuple, frozenset)) and not hasattr(value, "__dict__"):
        return Same(type(value)), [], [], elements(value)
    if type(value).__module__.partition(".")[0] in _OPAQUE:
        return Same(value), [], [], []
    return _object(value)


def _object(value: Any) -> tuple[Any, list[Any], list[Reader], list[Any]]:
    containers: list[Any] = []
    readers: list[Reader] = []
    parts: list[Any] = []
    if isinstance(value, CONTAINERS):
        containers.append(value)
        parts += elements(value)
    elif isinstance(value, partial):
        readers.append(lambda: (value.func, value.args, value.keywords))
        parts += readers[-1]()
    if isinstance(value, torch.jit.ScriptModule):
        # Its tensors are in C++, in none of its containers.
        readers.append(lambda: [*value.parameters(recurse=False), *value.buffers(recurse=False)])
        parts += readers[-1]()
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        parts.append(attributes)  # a dict, which is itself a container
    names = list(slot_names(type(value)))
    if names:
        readers.append(lambda: [getattr(value, name, _MISSING) for name in names])
        parts += readers[-1]()
    if not (containers or readers or attributes is not None):
        return Same(value), [], [], []
    if is_users(type(value).__module__):
        parts.append(type(value))
    return Same(type(value)), containers, readers, parts


def _function(function: FunctionType) -> tuple[Any, list[Any], list[Reader], list[Any]]:
    cells = [cell for _, cell in cells_of(function)]
    readers: list[Reader] = [
        lambda: map(_in_cell, cells),
        lambda: (function.__code__, function.__defaults__, function.__kwdefaults__),
    ]
    parts = [*map(_in_cell, cells), function.__defaults__, function.__kwdefaults__]
    if vars(function):
        parts.append(vars(function))
    if is_users(function.__globals__.get("__name__", "")):
        names, held = names_in(function.__code__), function.__globals__
        # `settings.scale` refers to an attribute of another module of the user's.
        found = [*map(held.get, names.of_globals + names.of_imports), *map(sys.modules.get, names.of_imports)]
        modules = [each for each in found if isinstance(each, ModuleType) and is_users(each.__name__)]
        spaces = [(held, names.of_globals), *((vars(each), names.of_all) for each in dict.fromkeys(modules))]
        for space, inside in spaces:
            readers.append(partial(_looked_up, space, [name for name in inside if name in space]))
            parts += readers[-1]()
    return ("function", function.__code__), [], readers, parts


def _class(cls: type) -> tuple[Any, list[Any], list[Reader], list[Any]]:
    names = [name for name, each in vars(cls).items() if not name.startswith("__") or isinstance(each, FunctionType)]
    bases = [each for each in cls.__mro__[1:] if is_users(each.__module__)]
    look = partial(_looked_up, vars(cls), names)
    return Same(cls), [], [look], [*map(_beneath, look()), *bases]


def _beneath(attribute: Any) -> Any:
    """Return the function of a static method, a class method or a property."""
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


def _looked_up(space: Any, names: Sequence[str]) -> list[Any]:
    return [space.get(name, _MISSING) for name in names]


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet, or no longer
        return _MISSING


def _numbers(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.dtype.str, array.shape, array.tobytes()
