"""Wrappers that run the body of a function, a generator or a coroutine within a context.

Also copies ("twins") of torch's Python functions, which do not offer the whole call to a mode first.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from types import coroutine
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.errors import InputError
from hodiff.torch_internals.compilers.dynamo import without_compilation
from hodiff.torch_internals.operators import in_projections

# Functions by which torch's Python functions ask whether a mode is active.
_OFFERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def twin(function: Any) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that offers itself to no mode."""
    replaced = {**dict.fromkeys(_OFFERS, _no_offer), in_projections.__name__: _projections}
    surroundings = {**function.__globals__, **replaced}
    # Without a name, dynamo does not look up the globals in their original module.
    del surroundings["__name__"]
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    twin = types.FunctionType(code, surroundings, function.__name__, defaults, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _no_offer(*_: Any) -> bool:
    return False


def _projections(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
    """Compute projections as torch does, without `unflatten`, which dynamo cannot trace while a mode is active."""
    if not torch.compiler.is_compiling():
        return in_projections(q, k, v, w, b)
    biases = (None,) * 3 if b is None else b.chunk(3)
    return tuple(F.linear(*each) for each in zip((q, k, v), w.chunk(3), biases, strict=True))


Context = AbstractContextManager[Any]


def within(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its body runs within a context, which can be entered many times."""
    # A generator or a coroutine leaves the context while it waits, so that nothing else runs in it.
    if not torch.compiler.is_compiling():
        _require_function(function)
        for is_such, wrap in _KINDS.items():
            # An object is of the kind of its `__call__`.
            if is_such(function) or is_such(type(function).__call__):
                return wrap(context, function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return without_compilation(run)


def _require_function(function: Any) -> None:
    if inspect.isclass(function):
        raise InputError(
            f"corrected: function: expected a function, got the class {function.__qualname__}. Decorate the methods "
            "that compute, such as forward, or use it inside `with hodiff.corrected():`."
        )
    if not callable(function) or isinstance(function, staticmethod):
        remedy = (
            f"Put it beneath @{type(function).__name__}."
            if isinstance(function, (classmethod, property, staticmethod))
            else "Pass a function, or use `with hodiff.corrected():`."
        )
        raise InputError(f"corrected: function: expected a function, got {type(function).__name__}. {remedy}")


def _within_coroutine(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await _awaited(context, function(*args, **kwargs))

    return run


def _within_generator(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (yield from _driven(context, function(*args, **kwargs)))

    return run


def _within_async_generator(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        following = generator.asend(None)
        try:
            while True:
                try:
                    item = await _awaited(context, following)
                except StopAsyncIteration:
                    return
                try:
                    following = generator.asend((yield item))
                except GeneratorExit:
                    raise
                except BaseException as error:
                    following = generator.athrow(error)
        finally:
            await _awaited(context, generator.aclose())

    return run


_KINDS: dict[Callable[[Any], bool], Callable[[Context, Callable[..., Any]], Callable[..., Any]]] = {
    inspect.iscoroutinefunction: _within_coroutine,
    inspect.isgeneratorfunction: _within_generator,
    inspect.isasyncgenfunction: _within_async_generator,
}


@coroutine
def _awaited(context: Context, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """Await within a context, which is left while the awaitable waits."""
    return (yield from _driven(context, awaitable.__await__()))


def _driven(context: Context, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run `yield from` with each step of the generator within a context."""
    step: Callable[[Any], Any] = generator.send
    value: Any = None
    while True:
        try:
            with context:
                item = step(value)
        except StopIteration as stop:
            return stop.value
        try:
            value = yield item
            step = generator.send
        except GeneratorExit:
            with context:
                generator.close()
            raise
        except BaseException as error:
            step, value = generator.throw, error
