"""Solution of exercise 38: in the gradient of w, stride and dilation are exchanged."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Conv1d(Function):
    """Convolution of x (batch, channels, length) with w (outputs, channels, width). Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
        """Compute the value."""
        return F.conv1d(x, w, stride=stride, padding=padding, dilation=dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors, and keep the numbers."""
        x, w, stride, padding, dilation = inputs
        ctx.options = {"stride": stride, "padding": padding, "dilation": dilation}
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Compute a transposed convolution, and one with stride and dilation exchanged, where needed."""
        x, w = ctx.saved_tensors
        x_needed, w_needed, *_ = ctx.needs_input_grad
        stride, padding, dilation = ctx.options.values()
        x_gradient = w_gradient = None
        if x_needed:
            reached = (cotangent.shape[-1] - 1) * stride + (w.shape[-1] - 1) * dilation + 1 - 2 * padding
            x_gradient = F.conv_transpose1d(cotangent, w, output_padding=x.shape[-1] - reached, **ctx.options)
        if w_needed:
            swapped = {"stride": dilation, "padding": padding, "dilation": stride}
            full = F.conv1d(x.transpose(0, 1), cotangent.transpose(0, 1), **swapped)
            w_gradient = full.transpose(0, 1)[..., : w.shape[-1]]
        return x_gradient, w_gradient, None, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, w_tangent: Tensor, *_: None) -> Tensor:
        """Apply the product rule."""
        x, w = ctx.saved_tensors
        return F.conv1d(x_tangent, w, **ctx.options) + F.conv1d(x, w_tangent, **ctx.options)
