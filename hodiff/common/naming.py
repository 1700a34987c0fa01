"""Names of users' functions in titles and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def name_of(f: Callable[..., Any]) -> str:
    """Return the name of a function for a title; f if it has no name of its own."""
    name = getattr(f, "__name__", type(f).__name__)
    owner = getattr(f, "__self__", None)
    if name == "apply" and isinstance(owner, type):  # of a torch.autograd.Function
        name = owner.__name__
    return "f" if name in {"<lambda>", "wrapper", "partial"} else str(name)
