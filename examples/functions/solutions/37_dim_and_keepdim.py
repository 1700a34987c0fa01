"""Solution of exercise 37: one form inside the Function, the options outside, as in the lesson."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Variance(Function):
    """Variance over dimensions counted from the end, which are kept. Saves the input."""

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Compute the value."""
        return deviations(x, dims).square().mean(dims, keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...]], output: Tensor) -> None:
        """Save the tensor; keep the dimensions and the count of their numbers."""
        x, ctx.dims = inputs
        ctx.count = math.prod(x.shape[dim] for dim in ctx.dims)
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        r"""Compute $\frac{2}{n} (x_i - x̄) ȳ$."""
        (x,) = ctx.saved_tensors
        return 2 / ctx.count * deviations(x, ctx.dims) * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, dims_tangent: None) -> Tensor:
        r"""Compute $\frac{2}{n} \sum_i (x_i - x̄) ẋ_i$."""
        del dims_tangent
        (x,) = ctx.saved_tensors
        return 2 * (deviations(x, ctx.dims) * tangent).mean(ctx.dims, keepdim=True)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, Any], x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, int]:
        """Move the batch to the front."""
        del info
        return Variance.apply(x.movedim(in_dims[0], 0), dims), 0


def deviations(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Compute deviations from the mean."""
    return x - x.mean(dims, keepdim=True)


def variance(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Apply the Function with the options of torch's reductions."""
    given = dim if isinstance(dim, tuple) else (dim,)
    dims = tuple(sorted(each if each < 0 else each - x.dim() for each in given))
    y = Variance.apply(x, dims)
    return y if keepdim else y.squeeze(dims)
