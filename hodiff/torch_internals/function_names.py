"""The names by which users call torch's functions."""

from __future__ import annotations

from typing import Any

from torch.overrides import resolve_name


def function_name(function: Any) -> str:
    """A function as users write it, without `torch.` in front."""
    name = str(resolve_name(function) or getattr(function, "__name__", None) or function)
    # The class that holds those of torch itself.
    return name.removeprefix("torch.").removeprefix("_VariableFunctionsClass.")
