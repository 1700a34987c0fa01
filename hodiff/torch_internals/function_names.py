"""The names by which users call torch's functions."""

from __future__ import annotations

from typing import Any

from torch.overrides import resolve_name


def function_name(function: Any) -> str:
    """A function as users write it, without `torch.` in front."""
    name = str(resolve_name(function) or getattr(function, "__name__", None) or function).removeprefix("torch.")
    # Those of torch itself stand in a class, whose name begins with a line.
    return name.partition(".")[2] if name.startswith("_") and "." in name else name
