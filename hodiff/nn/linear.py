"""Modules of linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.functions.linear.activations import FUSED_ACTIVATIONS
from hodiff.functions.linear.fused_linear import fused_linear


class FusedLinear(torch.nn.Linear):
    """`torch.nn.Linear` and its activation in one, by `hodiff.functions.fused_linear`; parameters have the same names.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        activation: "relu", "tanh", "silu" or "gelu".
        bias: Whether there is a bias.
        **options: `device` and `dtype`.

    Raises:
        InputError: If the activation is unknown.

    Example:
        >>> import torch
        >>> layer = FusedLinear(3, 2, activation="gelu")
        >>> layer(torch.ones(4, 3)).shape
        torch.Size([4, 2])
        >>> layer
        FusedLinear(in_features=3, out_features=2, bias=True, activation='gelu')
    """

    def __init__(
        self, in_features: int, out_features: int, activation: str = "relu", bias: bool = True, **options: Any
    ) -> None:
        require_choice("FusedLinear", "activation", activation, tuple(FUSED_ACTIVATIONS))
        super().__init__(in_features, out_features, bias, **options)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Apply layer and activation."""
        return fused_linear(input, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, activation={self.activation!r}"
