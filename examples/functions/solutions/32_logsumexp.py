"""Solution of exercise 32: both slopes are exponentials of differences from y; y and the shift are kept finite."""

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
        """Shift by the larger number, or by 0 if that is infinite."""
        shift = finite(torch.maximum(a, b))
        return ((a - shift).exp() + (b - shift).exp()).log() + shift

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute gradients in the shapes of the inputs, where needed."""
        a, b, y = ctx.saved_tensors
        a_needed, b_needed = ctx.needs_input_grad
        return (
            ((a - finite(y)).exp() * cotangent).sum_to_size(a.shape) if a_needed else None,
            ((b - finite(y)).exp() * cotangent).sum_to_size(b.shape) if b_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, a_tangent: Tensor, b_tangent: Tensor) -> Tensor:
        """Weight the tangents by their shares."""
        a, b = ctx.saved_tensors
        y = finite(LogAddExp.apply(a, b))
        return (a - y).exp() * a_tangent + (b - y).exp() * b_tangent


def finite(y: Tensor) -> Tensor:
    """Return the number, or 0 if it is infinite."""
    return torch.where(y.isinf(), 0.0, y)
