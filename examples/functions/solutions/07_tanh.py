"""Solution of exercise 7: the slope is 4 σ(2x) σ(-2x), a product that needs no subtraction."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Tanh(Function):
    r"""$\tanh x$. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        (x,) = ctx.saved_tensors
        return 4 * Sigmoid.apply(2 * x) * Sigmoid.apply(-2 * x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return 4 * Sigmoid.apply(2 * x) * Sigmoid.apply(-2 * x) * tangent


class Sigmoid(Function):
    r"""$σ(x)$, as in lesson 6. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * Sigmoid.apply(-x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * Sigmoid.apply(-x) * tangent
