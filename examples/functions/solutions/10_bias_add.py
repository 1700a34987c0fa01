"""Solution of exercise 10: b is repeated over the first and last dimension, so its gradient is summed over both."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class ChannelBias(Function):
    """$x + b$ along the second dimension. Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, b: Tensor) -> Tensor:
        """Compute the value."""
        return x + b[:, None]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the cotangent, and its sum over the dimensions along which b was repeated."""
        x_needed, b_needed = ctx.needs_input_grad
        return cotangent if x_needed else None, cotangent.sum((0, 2)) if b_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, b_tangent: Tensor) -> Tensor:
        """Apply the function itself, as it is linear."""
        return x_tangent + b_tangent[:, None]
