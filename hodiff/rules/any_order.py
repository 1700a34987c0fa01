"""Base class of Functions with a forward-mode rule that `torch.compile` can train through."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.common.overriding import tensors_alone
from hodiff.torch_internals.autograd.batching import (
    call_batched,
    call_below_legacy_batch,
    is_legacy_batched,
)
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform, innermost_is_vmap
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped, unwrap_if_ended
from hodiff.torch_internals.compilers.dynamo import dynamo_watches, hide_from_dynamo, is_dynamo_loaded

F = TypeVar("F", bound=Callable[..., Any])


class AnyOrderFunction(Function):
    """A `torch.autograd.Function` with `jvp` that works in compiled code; run it by `call`.

    Dynamo rejects a Function with `jvp` where a gradient is recorded, and never calls the rule. So every subclass has a
    twin without `jvp`, whose `backward` runs in compiled training. Compiled transforms of `torch.func` differentiate
    the operators of `forward`, except in a call that is one node of dynamo's graph.
    """

    _is_twin = False

    @staticmethod
    def call(*inputs: Any) -> Any:
        """Apply the Function, or its twin if dynamo traces, to all of its arguments."""
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        """Create the twin of the subclass."""
        super().__init_subclass__()
        if not cls._is_twin and cls.forward is not Function.forward:
            # Cache the signature, which Function.apply would compute at each call.
            cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
            twin = type(cls.__name__, (cls,), {"_is_twin": True, "__module__": cls.__module__})
            twin.jvp = staticmethod(Function.jvp)  # type: ignore[attr-defined]
            cls.call = staticmethod(_either(cls, twin))  # type: ignore[method-assign]


def _either(function: Any, twin: Any) -> Callable[..., Any]:
    # Function.apply fills in defaults, which takes a third of a small call's time; `call` gets all arguments.
    plain = super(Function, function).apply

    forward = function.forward
    batches = function.vmap is not Function.vmap and not function.generate_vmap_rule

    # Use a closure: dynamo neither reads attributes of a Function nor looks it up in a table.
    def call(*inputs: Any) -> Any:
        if traced_by_dynamo():
            # Dynamo of torch 2.13 passes a context to a variadic `forward` if nothing is recorded.
            return twin.apply(*inputs) if not in_transform() and _records(inputs) else forward(*inputs)
        if in_transform():
            if batches and innermost_is_vmap():
                return call_batched(function, call, inputs)
            return function.apply(*inputs)
        # Not by a helper: dynamo would compile its frame, and the results would require a gradient.
        for each in inputs:
            if isinstance(each, Tensor) and (is_wrapped(each) or is_legacy_batched(each)):
                inputs = tuple([unwrap_if_ended(x) if isinstance(x, Tensor) else x for x in inputs])
                for x in inputs:
                    if isinstance(x, Tensor) and is_legacy_batched(x):
                        return call_below_legacy_batch(call, inputs)
                break
        # If nothing is recorded, as in a last backward pass, the formula suffices.
        if not torch.is_grad_enabled() and not in_forward_mode():
            return forward(*inputs)
        return plain(*inputs)

    return call


def traced_by_dynamo() -> bool:
    """Whether dynamo traces this code, or an export runs it; False inside a node that dynamo left opaque."""
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_exporting() and torch.compiler.is_compiling())


def _records(inputs: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs)


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a result of `forward` to a dtype, if it has another."""
    # Compiled by torch 2.11, a result that `to` returns unchanged silently loses its gradient.
    return t if t.dtype == dtype else t.to(dtype)


def outside_graphs(function: F) -> F:
    """Keep dynamo from tracing a function, as `torch.compiler.disable` does, and refuse jets inside of it."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with tensors_alone():
            # `torch.compiler.disable` takes a second to import.
            return _disabled(function)(*args, **kwargs) if is_dynamo_loaded() else function(*args, **kwargs)

    # Keep dynamo from tracing this wrapper, too.
    hide_from_dynamo(
        outside,
        f"hodiff's {function.__name__} reads numbers of tensors, so it runs outside of graphs; compile without "
        "fullgraph=True",
    )
    return cast(F, outside)


def uncompiled(rule: F) -> F:
    """Keep dynamo from tracing the rule of a call made outside of graphs, and from compiling what the rule calls."""

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _disabled(rule)(*args, **kwargs) if dynamo_watches() else rule(*args, **kwargs)

    hide_from_dynamo(run)
    return cast(F, run)


def _disabled(function: Any) -> Any:
    """Return the function under `torch.compiler.disable`, cached as its attribute."""
    # Do not cache it in the closure of a wrapper: dynamo assumes that all closures of such a frame hold the same value.
    # A table would keep functions alive.
    known = vars(function)
    if "outside_graphs" not in known:
        known["outside_graphs"] = torch.compiler.disable(function)
    return known["outside_graphs"]
