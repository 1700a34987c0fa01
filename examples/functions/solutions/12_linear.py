"""Solution of exercise 12: three gradients, computed only where needed; the gradient of W is a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Bilinear(Function):
    """$x^T W y$. Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, W: Tensor, y: Tensor) -> Tensor:
        """Compute the value."""
        return x @ W @ y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute each gradient where it is needed."""
        x, W, y = ctx.saved_tensors
        x_needed, W_needed, y_needed = ctx.needs_input_grad
        return (
            cotangent * (W @ y) if x_needed else None,
            cotangent * torch.outer(x, y) if W_needed else None,
            cotangent * (x @ W) if y_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, W_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        """Apply the product rule."""
        x, W, y = ctx.saved_tensors
        return x_tangent @ W @ y + x @ W_tangent @ y + x @ W @ y_tangent
