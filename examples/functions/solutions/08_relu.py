"""Solution of exercise 8: the output has the sign of the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class LeakyRelu(Function):
    r"""$x$ or $0.1 x$. Saves the output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return torch.where(x > 0, x, 0.1 * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the output for reverse mode, and the input for forward mode."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply by the slope. A Python number times a tensor keeps its dtype; two in `torch.where` make float32."""
        (y,) = ctx.saved_tensors
        return torch.where(y > 0, cotangent, 0.1 * cotangent)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, tangent, 0.1 * tangent)
