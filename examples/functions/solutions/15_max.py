"""Solution of exercise 15: gradients go back to the places of the numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Sort(Function):
    """Numbers in rising order and their places. Saves the places."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the values and their places."""
        values, places = x.sort(-1)
        return values, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save the places."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, places_cotangent: Any) -> Tensor:
        """Put each cotangent at the place of its number."""
        del places_cotangent
        (places,) = ctx.saved_tensors
        return cotangent.new_zeros(cotangent.shape).scatter(-1, places, cotangent)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        """Take each tangent from the place of its number."""
        (places,) = ctx.saved_tensors
        return tangent.gather(-1, places), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Move the batch to the front."""
        del info
        return Sort.apply(x.movedim(in_dims[0], 0)), (0, 0)
