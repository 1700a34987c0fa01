"""The activations that `fused_linear` knows, each with its derivative by what is cheapest to keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


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


def _scaled_relu(t: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, t, 0.0)


def _scaled_tanh(t: Tensor, y: Tensor) -> Tensor:
    return t * ((1 - y) * (1 + y))


def _scaled_silu(t: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return t * (s + z * (s * torch.sigmoid(-z)))


def _scaled_gelu(t: Tensor, z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))
    return t * (0.5 * torch.erfc(z * -math.sqrt(0.5)) + z * density)


FUSED_ACTIVATIONS = {
    "relu": FusedActivation(torch.relu, _scaled_relu, from_output=True),
    "tanh": FusedActivation(torch.tanh, _scaled_tanh, from_output=True),
    "silu": FusedActivation(torch.nn.functional.silu, _scaled_silu, from_output=False),
    "gelu": FusedActivation(torch.nn.functional.gelu, _scaled_gelu, from_output=False),
}
