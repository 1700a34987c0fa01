"""Names of torch's functions in users' code."""

from __future__ import annotations

from typing import Any

from torch.overrides import resolve_name


def function_name(function: Any) -> str:
    """Return a function's name as users write it, without the prefix `torch.`."""
    name = str(resolve_name(function) or getattr(function, "__name__", None) or function).removeprefix("torch.")
    # Functions of torch itself are in a class whose name begins with an underscore.
    return name.partition(".")[2] if name.startswith("_") and "." in name else name
