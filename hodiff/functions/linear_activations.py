"""The activations that `fused_linear` knows, each with its derivative by what is cheapest to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.functions.activations import GELUSlope, SiLUSlope
from hodiff.functions.rectifiers import where_positive


class FusedActivation(NamedTuple):
    """An elementwise function $a$ and its derivative times a tensor.

    Attributes:
        value: $a(z)$.
        scaled: `scaled(t, r)` is $a'(z) t$, where r is $a(z)$ if `from_output`, and $z$ if not. It is differentiated
            again, so it is made of operators whose derivatives are stable.
        from_output: Whether the output says all about the derivative.
    """

    value: Callable[[Tensor], Tensor]
    scaled: Callable[[Tensor, Tensor], Tensor]
    from_output: bool


def _scaled_tanh(t: Tensor, y: Tensor) -> Tensor:
    return t * ((1 - y) * (1 + y))


FUSED_ACTIVATIONS = {
    "relu": FusedActivation(torch.relu, where_positive, from_output=True),
    "tanh": FusedActivation(torch.tanh, _scaled_tanh, from_output=True),
    "silu": FusedActivation(torch.nn.functional.silu, lambda t, z: t * SiLUSlope.call(z), from_output=False),
    "gelu": FusedActivation(torch.nn.functional.gelu, lambda t, z: t * GELUSlope.call(z), from_output=False),
}
