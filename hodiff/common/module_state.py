"""Contexts that restore buffers and attributes of modules after a run.

Parametrized weights of modules, which `torch.nn.utils.parametrize.cached` keeps even for other parameters.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.modules import (
    attributes_of,
    buffers_by_name,
    parametrized_anew,
    parametrized_weights_are_kept,
    tables_of,
)
from hodiff.torch_internals.threads import one_thread_at_a_time

P = ParamSpec("P")
R = TypeVar("R")


def at_another_point(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to recompute parametrized weights in each call, for `functional_call`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not parametrized_weights_are_kept():
            return function(*args, **kwargs)
        with parametrized_anew():
            return function(*args, **kwargs)

    return run


def functional_call(
    module: nn.Module, tensors: Mapping[str, Any], args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a module with other tensors, as `torch.func.functional_call` does, and leave its own in it."""
    # torch leaves the others in a submodule with two names: it restores under the second what it wrote under the first.
    held = [] if torch.compiler.is_compiling() else _tables_with_two_names(module)
    try:
        return torch.func.functional_call(module, dict(tensors), args, kwargs)
    finally:
        written = {id(each) for each in tensors.values()} if held else ()
        for table, before in held:
            for name, tensor in before.items():
                if id(table.get(name)) in written:
                    table[name] = tensor


def _tables_with_two_names(module: nn.Module) -> list[tuple[MutableMapping[str, Any], dict[str, Any]]]:
    """Return the tables of parameters and buffers of modules that have several names, with their content."""
    names = collections.Counter(map(id, (each for _, each in module.named_modules(remove_duplicate=False))))
    shared = [each for each in module.modules() if names[id(each)] > 1]
    tables = [table for each in shared for table in tables_of(each)]
    return [(table, dict(table.items())) for table in tables]


# The dict of a module's buffers, a name in it, and the tensor to put there.
Replacement = tuple[MutableMapping[str, Any], str, Tensor]
# Types of collections in which modules store what they compute.
_COLLECTIONS = (dict, list, set, collections.OrderedDict)
_MISSING = object()


@contextmanager
def exchanged_buffers(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Replace buffers of modules within the context, without writing into them, as graphs may have saved them."""
    if not replacements:
        yield
        return
    with one_thread_at_a_time():
        held = [owner[name] for owner, name, _ in replacements]
        try:
            for owner, name, tensor in replacements:
                owner[name] = tensor
            yield
        finally:
            for (owner, name, _), tensor in zip(replacements, held, strict=True):
                owner[name] = tensor


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore attributes of modules, and buffers of modules in training mode, after the context."""
    with attributes_put_back(modules), untouched_buffers(modules):
        yield


@contextmanager
def isolated_state(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules copies of their buffers and of tensors in their attributes; restore all attributes afterwards.

    Metrics add to tensors in their attributes, and their lists and dicts, in place.
    """
    modules = list(modules)
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        # Metrics may share a tensor.
        return copies.setdefault(id(value), value.detach().clone())

    buffers = [(owner, name, copied(b)) for owner in map(buffers_by_name, modules) for name, b in owner.items()]
    with attributes_put_back(modules), exchanged_buffers([each for each in buffers if each[2] is not None]):
        for module in modules:
            for name, value in attributes_of(module).items():
                if isinstance(value, Tensor):
                    vars(module)[name] = copied(value)
                elif value and isinstance(value, (dict, list)) and type(value) in _COLLECTIONS:
                    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                        value[key] = copied(each)
        yield


@contextmanager
def attributes_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules, and the contents of their dicts, lists and sets, after the context.

    A tensor that one evaluation stores would be a constant to the next; a transform's tensor is invalid after it.
    One thread at a time, as the attributes include hooks, with which another thread may be recording layers.
    """
    modules = list(modules)
    with one_thread_at_a_time() if modules else nullcontext():
        yield from _attributes_put_back(modules)


def _attributes_put_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    kept = [(module, attributes_of(module)) for module in modules]
    # Most collections are tables of hooks, and empty.
    values = (each for _, before in kept for each in before.values())
    held = [(each, each.copy() if each else ()) for each in values if type(each) in _COLLECTIONS]
    try:
        yield
    finally:
        for module, before in kept:
            attributes = vars(module)
            # The dict is not cleared, as other threads may read it.
            for name in attributes_of(module).keys() - before.keys():
                del attributes[name]
            for name, value in before.items():
                if attributes.get(name, _MISSING) is not value:
                    attributes[name] = value
        for collection, contents in held:
            if (collection or contents) and not (collection and contents and _same(collection, contents)):
                _refill(collection, contents)


@contextmanager
def buffers_unwrapped(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore buffers that a transform replaced by its own tensors, which are invalid after it."""
    kept = [(owner, dict(owner)) for owner in map(buffers_by_name, modules)]
    try:
        yield
    finally:
        for owner, before in kept:
            for name, buffer in before.items():
                if isinstance(found := owner.get(name), Tensor) and found is not buffer and is_wrapped(found):
                    owner[name] = buffer


def _same(one: Any, other: Any) -> bool:
    """Whether two collections of the same type hold identical objects."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(value is other[name] for name, value in one.items())
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _refill(collection: Any, contents: Any) -> None:
    collection.clear()
    if isinstance(collection, list):
        collection.extend(contents)
    else:
        collection.update(contents)


@contextmanager
def untouched_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules in training mode update copies of their buffers within the context."""
    # A frozen script has no attribute `training`.
    owners = [buffers_by_name(module) for module in modules if getattr(module, "training", False)]
    if not any(owners):
        yield
        return
    with one_thread_at_a_time():  # otherwise the copies may be those of another thread
        copies = [
            (owner, name, buffer.clone())
            for owner in owners
            for name, buffer in owner.items()
            if isinstance(buffer, Tensor)
        ]
        with exchanged_buffers(copies):
            yield
