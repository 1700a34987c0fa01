"""Solution of exercise 11: the slope in y is -x / y²."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Divide(Function):
    """$x / y$ with broadcasting. Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        """Compute the value."""
        return x / y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute gradients in the shapes of the inputs."""
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return (
            (cotangent / y).sum_to_size(x.shape) if x_needed else None,
            (-cotangent * x / y**2).sum_to_size(y.shape) if y_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        """Apply the quotient rule."""
        x, y = ctx.saved_tensors
        return (x_tangent - x / y * y_tangent) / y
