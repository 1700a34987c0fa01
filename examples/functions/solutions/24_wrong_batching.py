"""Solution of exercise 24: the last of the other dimensions is -1, or -2 where the batch is last."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Mean(Function):
    """Mean over a dimension. Saves nothing."""

    @staticmethod
    def forward(x: Tensor, dim: int = -1) -> Tensor:
        """Compute the value."""
        return x.mean(dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Keep the shape and the dimension."""
        x, ctx.dim = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Repeat the cotangent, divided by the count."""
        return (cotangent / ctx.shape[ctx.dim]).unsqueeze(ctx.dim).expand(ctx.shape), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, dim_tangent: None) -> Tensor:
        """Apply the function itself, as it is linear."""
        del dim_tangent
        return tangent.mean(ctx.dim)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, dim: int) -> tuple[Tensor, int]:
        """Skip the batch in the dimension, counted from the end: the batch shifts the dimensions before it."""
        del info
        batch = in_dims[0] - x.dim()
        dim = dim - 1 if batch >= dim else dim
        # The result's batch moves towards the end if the mean is over a dimension behind it.
        return Mean.apply(x, dim), in_dims[0] if batch < dim else in_dims[0] - 1
