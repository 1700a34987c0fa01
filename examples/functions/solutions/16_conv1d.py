"""Solution of exercise 16: the transpose of a transposed convolution is a convolution."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class TransposedConv1d(Function):
    """Transposed convolution of x (batch, inputs, length) with w (inputs, outputs, width). Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        """Compute the value."""
        return F.conv_transpose1d(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute two convolutions, where needed: w slides over the cotangent, and so does x."""
        x, w = ctx.saved_tensors
        x_needed, w_needed = ctx.needs_input_grad
        return (
            F.conv1d(cotangent, w) if x_needed else None,
            F.conv1d(cotangent.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1) if w_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, w_tangent: Tensor) -> Tensor:
        """Apply the product rule."""
        x, w = ctx.saved_tensors
        return F.conv_transpose1d(x_tangent, w) + F.conv_transpose1d(x, w_tangent)
