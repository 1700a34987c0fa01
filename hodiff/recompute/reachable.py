"""The objects that a callable can reach, and the places in these objects that hold tensors.

Errors for tensors that a callable reaches in ways that discovery misses, so that their derivatives would be lost.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.common.overriding import is_moving
from hodiff.common.randomness import RandomState, is_generator
from hodiff.distributed.fully_sharded import Gathering
from hodiff.errors import InputError
from hodiff.recompute.names_in_code import names_in
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


# Globals of these modules' functions hold nothing of the user's.
LIBRARIES = {"torch", "hodiff", "numpy", "scipy", "functools", "builtins"}
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
    # Hooks lead to all parameters of a model, which a part of the model does not use.
    Gathering,
)
_CONTAINERS = {dict, OrderedDict, list, tuple}
_INSTALLED = {"site-packages", "dist-packages"}
_EMPTY = CellType()
# Getter and setter of a place, and whether to keep the place whatever it holds: a loop may rebind a closure's cell.
Place = tuple[Callable[[], Any], Callable[[Any], None], bool]


# Tensor's own instance check runs in Python, and this check runs for every value that a module holds.
@lru_cache(maxsize=1024)
def is_tensor(kind: type) -> bool:
    """Whether a type is a tensor type."""
    return issubclass(kind, Tensor)


@lru_cache(maxsize=1024)
def is_atom(kind: type) -> bool:
    """Whether values of a type can hold no tensor."""
    return issubclass(kind, _ATOMS)


def reachable(*roots: Any, empty: bool = True) -> Iterator[Any]:
    """Yield each object that a callable can reach and that may hold a tensor, once; tensors are not yielded.

    Args:
        *roots: The callables.
        empty: Whether to yield dicts, lists and tuples that are empty now.
    """
    seen: dict[int, Any] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        kind: Any = type(value)
        if is_atom(kind) or is_tensor(kind) or id(value) in seen or (kind is dict and _is_namespace(value)):
            continue
        if not empty and kind in _CONTAINERS and not value:
            continue
        # The reference keeps the id from being reused.
        seen[id(value)] = value
        yield value
        if not isinstance(value, torch.Generator):
            stack.extend(get() for get, _, _ in places(value))
            stack.extend(_parts(value))


def modules_in(*roots: Any) -> list[nn.Module]:
    """Return the modules that callables close over, outermost first."""
    return [value for value in reachable(*roots, empty=False) if isinstance(value, nn.Module)]


def named_tensors(value: Any, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that a callable uses by name: from cells, partial arguments, `self`, parameters of a module."""
    # This runs at each call, so it skips further objects and namespaces, whose contents may be unused.
    if depth == 0:
        return
    if isinstance(value, partial):
        yield from named_tensors(value.func, depth)
        held = {f"argument {i}": each for i, each in enumerate(value.args)} | value.keywords
    elif isinstance(value, MethodType):
        yield from named_tensors(value.__func__, depth)
        held = {"self": value.__self__}
    elif isinstance(value, nn.Module):
        held = dict(value.named_parameters())
    elif isinstance(value, FunctionType):
        held = {name: cell.cell_contents for name, cell in cells_of(value)}
    else:
        return
    for name, each in held.items():
        for leaf in pytree.tree_leaves(each):
            if isinstance(leaf, Tensor):
                yield name, leaf
            else:
                yield from named_tensors(leaf, depth - 1)


def draw_of(tensors: Iterable[Tensor], *roots: Any) -> RandomState:
    """Return the states of all generators that a callable may draw from."""
    generators = () if torch.compiler.is_compiling() else filter(is_generator, reachable(*roots))
    return RandomState(tensors, generators, foreign=True)


def named_modules(value: Any, depth: int = 3) -> Iterator[nn.Module]:
    """Yield modules that a callable uses by name: from cells, globals, arguments of a partial, `self`."""
    if isinstance(value, nn.Module):
        yield from value.modules()
    if depth == 0 or not isinstance(value, (partial, MethodType, FunctionType)):
        return
    if isinstance(value, partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        held = [value.__func__, value.__self__]
    else:
        cells = [cell.cell_contents for _, cell in cells_of(value)]
        held = cells + [value.__globals__[name] for name in names_of_globals(value)]
    for each in held:
        yield from named_modules(each, depth - 1)


def names_tensors(value: Any) -> bool:
    """Whether `named_tensors` may find anything in a value."""
    return isinstance(value, (partial, MethodType, nn.Module)) or bool(getattr(value, "__closure__", None))


def places(value: Any) -> Iterator[Place]:
    """Yield the places in an object where tensors can be replaced, and whether to keep each whatever it holds."""
    if isinstance(value, FunctionType):
        for _, cell in cells_of(value):
            yield partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"), True
        if value.__defaults__:
            yield partial(getattr, value, "__defaults__"), partial(setattr, value, "__defaults__"), False
        yield from _entries(value.__globals__, names_of_globals(value))
    elif isinstance(value, partial):
        yield (lambda: value.args), partial(_set_partial_arguments, value), False
    elif isinstance(value, dict):
        # A subclass's own lookup may import a module for each key.
        yield from _entries(value, list(dict.keys(value)))
    elif isinstance(value, list):
        yield from _entries(value, range(len(value)))
    else:
        for name in slot_names(type(value)):
            if hasattr(value, name):
                yield partial(getattr, value, name), partial(object.__setattr__, value, name), True


def names_of_globals(function: FunctionType) -> list[str]:
    """Return the globals that a user's function looks up by name."""
    held = function.__globals__
    if _is_library(held):
        return []
    names = names_in(function.__code__)
    found = [name for name in names.of_globals if name in held]
    # A global may be the attribute of its own module: `this = sys.modules[__name__]`, then `this.weight`.
    own = any(type(held[name]) is ModuleType and vars(held[name]) is held for name in found)
    if own or held.get("__name__") in names.of_imports:
        return [name for name in names.of_all if name in held]
    return found


@cache
def is_users(module: str) -> bool:
    """Whether a module belongs to the user, and not to Python or an installed package, whose globals are ignored."""
    root = module.partition(".")[0]
    if root in LIBRARIES or root in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    installed = (sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    return file is None or not (
        any(Path(file).is_relative_to(folder) for folder in installed)
        # Packages of the system, of the user, or of other environments on the path.
        or _INSTALLED & set(Path(file).parts)
    )


def _is_library(namespace: dict[str, Any]) -> bool:
    return namespace.get("__name__", "").partition(".")[0] in LIBRARIES and _is_namespace(namespace)


def _is_namespace(held: dict[Any, Any]) -> bool:
    """Whether a dictionary is the namespace of a module, which leads to everything that is loaded."""
    name = held.get("__name__")
    return isinstance(name, str) and getattr(sys.modules.get(name), "__dict__", None) is held


def _entries(container: Any, keys: Sequence[Any]) -> Iterator[Place]:
    get = dict.__getitem__.__get__(container) if isinstance(container, dict) else container.__getitem__
    for key in keys:
        kind: Any = type(get(key))
        if not is_atom(kind):
            yield partial(get, key), partial(container.__setitem__, key), False


def _parts(value: Any) -> Iterator[Any]:
    """Yield further objects that an object holds."""
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
    if is_users(type(value).__module__):
        # Methods may name globals, too.
        for cls in type(value).__mro__:
            if is_users(cls.__module__):
                yield from (each for each in vars(cls).values() if isinstance(each, FunctionType))


def slot_names(cls: type) -> Iterator[str]:
    """Yield the names of the slots of a class and its bases."""
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


def cells_of(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    """Yield the variables that a function closes over, except those not bound yet."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != _EMPTY:
            yield name, cell


def _set_partial_arguments(function: partial[Any], arguments: tuple[Any, ...]) -> None:
    function.__setstate__((function.func, arguments, function.keywords, function.__dict__))  # type: ignore[attr-defined]
