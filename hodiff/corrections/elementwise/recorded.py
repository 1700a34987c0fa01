"""Rules for activations that record derivatives, so that products at one point take no exponentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.functions.activations.recorded import record

# A single product gains nothing at any size: recording costs what the product saves.
LEAST_ELEMENTS = 2**62


def recorded(name: str, **options: Any) -> Callable[..., Any]:
    """Return the rule for an activation, which applies with these options only."""

    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**options, **dict(zip(options, args, strict=False)), **kwargs}
        return record(input, name) if given == options and _is_recorded(input) else UNNEEDED

    return rule


def _is_recorded(input: Any) -> bool:
    return (
        isinstance(input, Tensor)
        and input.requires_grad
        and torch.is_grad_enabled()
        and input.dtype in (torch.float32, torch.float64)
    )


def recorded_gelu(input: Tensor, approximate: str = "none") -> Any:
    """Rule for both forms of GELU."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return record(input, names[approximate]) if approximate in names and _is_recorded(input) else UNNEEDED
