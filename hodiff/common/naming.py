"""What users' functions are called where they are spoken of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def name_of(f: Callable[..., Any]) -> str:
    """What a function is called in a title: f, where it has no name of its own."""
    name = getattr(f, "__name__", type(f).__name__)
    owner = getattr(f, "__self__", None)
    if name == "apply" and isinstance(owner, type):  # of a torch.autograd.Function
        name = owner.__name__
    return "f" if name in {"<lambda>", "wrapper", "partial"} else str(name)
