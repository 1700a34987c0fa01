"""Solution of exercise 35: the slope of A' is x A, so that two functions are enough."""

from __future__ import annotations

from typing import Any

import torch
from scipy.special import airy
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Airy(Function):
    """Airy function A or A'. Saves the input."""

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:
        """Compute by SciPy, outside of torch."""
        return torch.as_tensor(airy(x.detach().numpy())[order]).to(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Save the tensor, and keep the order."""
        x, ctx.order = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Call the Function, not SciPy."""
        (x,) = ctx.saved_tensors
        return slope(x, ctx.order) * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, order_tangent: None) -> Tensor:
        """Call the Function, not SciPy."""
        del order_tangent
        (x,) = ctx.saved_tensors
        return slope(x, ctx.order) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, order: int) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Airy.apply(x, order), in_dims[0]


def slope(x: Tensor, order: int) -> Tensor:
    """Return A' for A, and x A for A'."""
    return x * Airy.apply(x, 0) if order else Airy.apply(x, 1)
