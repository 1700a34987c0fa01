"""Rules for activations, recorded so that products at one point take no exponentials; see the Functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.functions.activations.recorded import record

# A single product gains nothing, at any size: what it spares it has spent on recording.
LEAST_ELEMENTS = 2**62


def recorded(name: str, **options: Any) -> Callable[..., Any]:
    """The rule of an activation, for these options alone."""

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


_lean = partial(
    register, kind="slow", least_elements=LEAST_ELEMENTS, covers=lambda input, *_, **__: _is_recorded(input)
)
_EXPONENTIALS = "double backward takes exponentials again for each product, in ten passes where three do"


@_lean(F.gelu, name="torch.nn.functional.gelu", reason=_EXPONENTIALS)
def _gelu(input: Tensor, approximate: str = "none") -> Any:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return record(input, names[approximate]) if approximate in names else UNNEEDED


def _is_complex(input: Any, inplace: bool = False) -> bool:
    return isinstance(input, Tensor) and input.is_complex()


@register(
    F.silu,
    name="torch.nn.functional.silu",
    kind="slow",
    least_elements=LEAST_ELEMENTS,
    mends=_is_complex,
    reason=f"{_EXPONENTIALS}; of complex numbers forward mode is wrong",
)
def _silu(input: Tensor, inplace: bool = False) -> Any:
    if _is_complex(input):
        value = input * torch.sigmoid(input)
        return input.copy_(value) if inplace else value
    return record(input, "silu") if _is_recorded(input) and not inplace else UNNEEDED


@_lean(F.mish, name="torch.nn.functional.mish", reason=_EXPONENTIALS)
def _mish(input: Tensor, inplace: bool = False) -> Any:
    return UNNEEDED if inplace else record(input, "mish")
