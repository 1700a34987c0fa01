"""Solution of exercise 27: backward recomputes the denominator from the saved input."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class LogOfOnePlusSquare(Function):
    r"""$\log(1 + x^2)$. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return (1 + x * x).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        (x,) = ctx.saved_tensors
        return 2 * x / (1 + x * x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return 2 * x / (1 + x * x) * tangent
