"""Solution of exercise 36: the slope is -1 everywhere; only the mark must not be forgotten."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class InPlaceNegation(Function):
    """In-place $-x$. Saves nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Write into x, and return it."""
        return x.neg_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Mark the input as modified."""
        ctx.mark_dirty(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Return a new tensor: the cotangent must not be written to."""
        return -cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Write into the tangent, too."""
        return tangent.neg_()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return InPlaceNegation.apply(x), in_dims[0]
