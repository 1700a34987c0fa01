"""What dynamo is told about a function; it is not loaded before something is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_dynamo_loaded() -> bool:
    """Whether dynamo has been imported, without which nothing can be traced."""
    return "torch._dynamo" in sys.modules


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Mark a function as one that dynamo does not look into."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]


def as_one_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one node of a compiled graph, through which torch differentiates as in eager code."""
    import torch._dynamo

    return torch._dynamo.nonstrict_trace(function)
