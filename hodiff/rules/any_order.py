"""The base class of Functions with a forward-mode rule, and how to call it so that `torch.compile` can train."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.common.overriding import tensors_alone
from hodiff.torch_internals.autograd.batching import call_batched
from hodiff.torch_internals.autograd.forward_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform, innermost_is_vmap
from hodiff.torch_internals.autograd.wrapped_tensors import unwrap_all_ended
from hodiff.torch_internals.compilers.dynamo import hide_from_dynamo, is_dynamo_loaded

F = TypeVar("F", bound=Callable[..., Any])


class AnyOrderFunction(Function):
    """A `torch.autograd.Function` with `jvp` that may stand in compiled code; call it by `call`.

    Dynamo refuses a Function with `jvp` where a gradient is recorded, and never calls the rule. So every subclass has a
    twin without, whose `backward` compiled training runs; compiled transforms of `torch.func` differentiate what
    `forward` consists of, but for a call that is one node of dynamo's graph.
    """

    _is_twin = False

    @staticmethod
    def call(*inputs: Any) -> Any:
        """Apply the Function to all its arguments, or its twin where dynamo traces."""
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        """Make the twin, after whatever the classes between make of the subclass."""
        super().__init_subclass__()
        if not cls._is_twin and cls.forward is not Function.forward:
            # Function.apply asks for it each time, and would work it out anew.
            cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
            twin = type(cls.__name__, (cls,), {"_is_twin": True, "__module__": cls.__module__})
            twin.jvp = staticmethod(Function.jvp)  # type: ignore[attr-defined]
            cls.call = staticmethod(_either(cls, twin))  # type: ignore[method-assign]


def _either(function: Any, twin: Any) -> Callable[..., Any]:
    # Function.apply fills in defaults, which a call with all arguments does not need: a third of a small call's time.
    plain = super(Function, function).apply

    forward = function.forward
    batches = function.vmap is not Function.vmap and not function.generate_vmap_rule

    # A closure, as dynamo reads no attribute of a Function and looks none up in a table.
    def call(*inputs: Any) -> Any:
        if traced_by_dynamo():
            # Dynamo of torch 2.13 hands a context to a `forward` of any number of arguments where nothing records.
            return twin.apply(*inputs) if not in_transform() and _records(inputs) else forward(*inputs)
        if in_transform():
            if batches and innermost_is_vmap():
                return call_batched(function, call, inputs)
            return function.apply(*inputs)
        inputs = unwrap_all_ended(inputs)
        # Where nothing records, as in a last backward pass, the formula alone will do.
        if not torch.is_grad_enabled() and not in_forward_mode():
            return forward(*inputs)
        return plain(*inputs)

    return call


def traced_by_dynamo() -> bool:
    """Whether dynamo reads this code, or an export runs it; not where a compiler runs what dynamo left as one node."""
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and torch.compiler.is_exporting())


def _records(inputs: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs)


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a result of `forward`, or hand it on."""
    # Compiled by torch 2.11, a result that `to` hands on as it is loses its gradient, and nothing is said.
    return t if t.dtype == dtype else t.to(dtype)


def outside_graphs(function: F) -> F:
    """Keep dynamo from tracing a function, as `torch.compiler.disable` does, and refuse jets inside of it."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with tensors_alone():
            # `torch.compiler.disable` takes a second to import.
            return _disabled(function)(*args, **kwargs) if is_dynamo_loaded() else function(*args, **kwargs)

    # Keeps dynamo from looking into this wrapper, too.
    hide_from_dynamo(outside)
    return cast(F, outside)


def _disabled(function: Any) -> Any:
    """The function under `torch.compiler.disable`, made once."""
    # Not kept in the closure of a wrapper: dynamo, where it meets such a frame, takes what one closure holds for what
    # all do. Nor in a table, which would keep functions alive.
    known = vars(function)
    if "outside_graphs" not in known:
        known["outside_graphs"] = torch.compiler.disable(function)
    return known["outside_graphs"]
