"""Solution of exercise 22: as an output the slope is part of the graph, and has a cotangent."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Square(Function):
    """$(x^2, 2x)$. Saves the second output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value and the slope."""
        return x * x, 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, y_cotangent: Tensor, slope_cotangent: Tensor) -> Tensor:
        """Add the contribution through the slope."""
        (slope,) = ctx.saved_tensors
        return slope * y_cotangent + 2 * slope_cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return one tangent per output."""
        (x,) = ctx.saved_tensors
        return 2 * x * tangent, 2 * tangent


def square(x: Tensor) -> Tensor:
    """Return the value alone."""
    return Square.apply(x)[0]
