"""What dynamo is told about a function; it is not loaded before something is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


def is_dynamo_loaded() -> bool:
    """Whether dynamo has been imported, without which nothing can be traced."""
    return "torch._dynamo" in sys.modules


def is_compiled(value: Any) -> bool:
    """Whether a module or function is what torch.compile made of one."""
    if not is_dynamo_loaded():
        return False
    return isinstance(value, torch._dynamo.OptimizedModule) or hasattr(value, "_torchdynamo_orig_callable")


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Mark a function as one that dynamo does not look into."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]


def as_one_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one node of a compiled graph, through which torch differentiates as in eager code."""
    import torch._dynamo

    return torch._dynamo.nonstrict_trace(function)


def at_trace_time(function: Callable[[], None]) -> Callable[[], None]:
    """Mark a function as one that runs when dynamo meets it, and leaves nothing in the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return function


def show_to_modes(functions: Iterable[Callable[..., Any]]) -> None:
    """Let function modes see these while dynamo traces, as they do else; it shows them public ones alone."""
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().update(functions)
