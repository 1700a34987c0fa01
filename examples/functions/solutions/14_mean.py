"""Solution of exercise 14: the slope is 2 (x - mean) / n, as the mean's contribution cancels: deviations sum to 0."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Variance(Function):
    """Variance over the last dimension. Saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return deviations(x).square().mean(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        r"""Compute $\frac{2}{n} (x_i - x̄) ȳ$."""
        (x,) = ctx.saved_tensors
        return 2 / x.shape[-1] * deviations(x) * cotangent.unsqueeze(-1)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        r"""Compute $\frac{2}{n} \sum_i (x_i - x̄) ẋ_i$."""
        (x,) = ctx.saved_tensors
        return 2 * (deviations(x) * tangent).mean(-1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Move the batch to the front."""
        del info
        return Variance.apply(x.movedim(in_dims[0], 0)), 0


def deviations(x: Tensor) -> Tensor:
    """Compute deviations from the mean."""
    return x - x.mean(-1, keepdim=True)
