"""The base class of Functions with a forward-mode rule, and how to call it so that `torch.compile` can train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import Function

F = TypeVar("F", bound=Callable[..., Any])


class AnyOrderFunction(Function):
    """A `torch.autograd.Function` with `jvp` that may stand in compiled code; call it by `call`.

    Dynamo refuses a Function with `jvp` where a gradient is recorded, and never calls the rule. So every subclass has a
    twin without: compiled code differentiates `backward` in reverse mode, and what `forward` consists of in forward
    mode.
    """

    _is_twin = False

    @staticmethod
    def call(*inputs: Any) -> Any:
        """Apply the Function, or its twin where dynamo traces."""
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        """Make the twin, after whatever the classes between make of the subclass."""
        super().__init_subclass__()
        if not cls._is_twin and cls.forward is not Function.forward:
            twin = type(cls.__name__, (cls,), {"_is_twin": True, "__module__": cls.__module__})
            twin.jvp = staticmethod(Function.jvp)  # type: ignore[attr-defined]
            cls.call = staticmethod(_either(cls, twin))  # type: ignore[method-assign]


def _either(function: Any, twin: Any) -> Callable[..., Any]:
    # A closure, as dynamo reads no attribute of a Function and looks none up in a table.
    def call(*inputs: Any) -> Any:
        # Within a transform nothing is recorded, and dynamo differentiates what it finds in `forward`.
        if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            return twin.apply(*inputs)
        return function.apply(*inputs)

    return call


def outside_graphs(function: F) -> F:
    """Keep dynamo from tracing a function, as `torch.compiler.disable` does, which takes a second to import.

    Args:
        function: What to run between two graphs; `fullgraph=True` raises.

    Returns:
        The function.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
