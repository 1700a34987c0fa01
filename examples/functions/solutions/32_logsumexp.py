"""Solution of exercise 32: both slopes are sigmoids of differences from y; y is made finite, and so is the shift."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class LogAddExp(Function):
    r"""$\log(e^a + e^b)$ with broadcasting. Saves inputs and output; forward mode saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        """Shift by the larger, or by 0 where that is infinite."""
        shift = finite(torch.maximum(a, b))
        return ((a - shift).exp() + (b - shift).exp()).log() + shift

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save for each direction what is right there."""
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients in the shapes of the inputs, where needed."""
        a, b, y = ctx.saved_tensors
        a_needed, b_needed = ctx.needs_input_grad
        return (
            ((a - finite(y)).exp() * cotangent).sum_to_size(a.shape) if a_needed else None,
            ((b - finite(y)).exp() * cotangent).sum_to_size(b.shape) if b_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, a_tangent: Tensor, b_tangent: Tensor) -> Tensor:
        """Tangents by their shares."""
        a, b = ctx.saved_tensors
        y = finite(LogAddExp.apply(a, b))
        return (a - y).exp() * a_tangent + (b - y).exp() * b_tangent


def finite(y: Tensor) -> Tensor:
    """The number, or 0 where it is infinite."""
    return torch.where(y.isinf(), 0.0, y)
