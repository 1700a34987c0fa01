"""Activations of `fused_linear`, with derivatives computed from the tensor that is cheapest to save."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.functions.activations.gated import GELU, SiLU
from hodiff.functions.activations.gated_derivatives import GELUSlope, SiLUSlope
from hodiff.functions.activations.rectifiers import MaskedReLU, where_positive


class FusedActivation(NamedTuple):
    """An elementwise function $a$ and its derivative times a tensor."""

    value: Callable[[Tensor], Tensor]
    # `scaled(t, r)` is a'(z) t, where r is a(z) if `from_output`, and z if not. It is differentiated again, so its
    # operators have stable derivatives.
    scaled: Callable[[Tensor, Tensor], Tensor]
    from_output: bool
    # a(z) as a Function that saves less than the output, or saves z, which can be recomputed; None if neither.
    alone: Callable[[Tensor], Tensor] | None


def _scaled_tanh(t: Tensor, y: Tensor) -> Tensor:
    return t * ((1 - y) * (1 + y))


FUSED_ACTIVATIONS = {
    "relu": FusedActivation(torch.relu, where_positive, from_output=True, alone=lambda z: MaskedReLU.call(z)[0]),
    "tanh": FusedActivation(torch.tanh, _scaled_tanh, from_output=True, alone=None),
    "silu": FusedActivation(SiLU.forward, SiLUSlope.scaled, from_output=False, alone=SiLU.call),
    "gelu": FusedActivation(GELU.forward, GELUSlope.scaled, from_output=False, alone=GELU.call),
}
