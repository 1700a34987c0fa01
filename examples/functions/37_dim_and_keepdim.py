r"""Lesson 37: `dim` and `keepdim`.

$$ y = \sqrt{ε + \tfrac{1}{n} \sum_i x_i^2}, \qquad \bar x_i = \frac{x_i}{n y} \, \bar y, \qquad
   \dot y = \frac{1}{n y} \sum_i x_i \, \dot x_i $$

with ε = 0.01, so that y is smooth at 0. The sum is over the dimensions in `dim`, one or several, counted from either
end; `keepdim` keeps them with size 1. A plain wrapper handles these options, so that the Function has one form. Its
dimensions are a sorted tuple, counted from the *end*, which a batch in front does not shift (lesson 14), and it keeps
them. Then the rules broadcast directly, and torch removes the dimensions of size 1, with the right derivative.

The options therefore need no rule.

    python examples/functions/37_dim_and_keepdim.py

Exercise: write `variance(x, dim, keepdim=False)`, $\frac{1}{n} \sum_i (x_i - \bar x)^2$ with the mean $\bar x$, in this
manner.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([[[0.5, -1.2, 2.0], [0.3, -0.7, 1.1]]], dtype=torch.float64), (0, -1))
EPSILON = 0.01


class RootMeanSquare(Function):
    """Root mean square over kept dimensions, counted from the end. Saves input and output; forward mode the input."""

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Compute the value."""
        return (EPSILON + x.square().mean(dims, keepdim=True)).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...]], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode; keep the dimensions and the count of their numbers."""
        x, ctx.dims = inputs
        ctx.count = math.prod(x.shape[dim] for dim in ctx.dims)
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """$x_i ȳ / (n y)$."""
        x, y = ctx.saved_tensors
        return x * (cotangent / (ctx.count * y)), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, dims_tangent: None) -> Tensor:
        r"""$\sum_i x_i ẋ_i / (n y)$."""
        del dims_tangent
        (x,) = ctx.saved_tensors
        y = RootMeanSquare.apply(x, ctx.dims)
        return (x * tangent).sum(ctx.dims, keepdim=True) / (ctx.count * y)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, int]:
        """Move the batch to the front, which negative dimensions do not reach."""
        del info
        return RootMeanSquare.apply(x.movedim(in_dims[0], 0), dims), 0


def root_mean_square(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Apply the Function with the options of torch's reductions."""
    dims = from_the_end(x, dim)
    y = RootMeanSquare.apply(x, dims)
    return y if keepdim else y.squeeze(dims)


def from_the_end(x: Tensor, dim: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return dimensions as sorted negative numbers; raise if one is out of range or named twice."""
    given = dim if isinstance(dim, tuple) else (dim,)
    dims = tuple(sorted(each if each < 0 else each - x.dim() for each in given))
    if len(set(dims)) < len(dims) or any(not -x.dim() <= each < 0 for each in dims):
        raise ValueError(f"dim: expected different ones from {-x.dim()} to {x.dim() - 1}, got {dim}.")
    return dims


def draw(figure: Any) -> None:
    """Hessians in a matrix of 2 × 3, for sums over all of it, columns and rows; only numbers summed together mix."""
    x = INPUTS[0][0]
    for k, (dim, title) in enumerate({(0, 1): "dim=(0, 1)", (0,): "dim=0", (1,): "dim=1"}.items()):
        H = hodiff.hessian_matrix(lambda x, dim=dim: root_mean_square(x, dim).sum(), x)
        axes = figure.add_subplot(1, 3, k + 1)
        axes.imshow(H.numpy(), cmap="bwr", vmin=-0.5, vmax=0.5)
        axes.set_title(title, fontsize="medium")
        axes.set_xticks([])
        axes.set_yticks([])


def main() -> hodiff.Report:
    """Print shapes, and check the reduction over the first and last of three dimensions to third order."""
    x, dim = INPUTS
    for options in ({"dim": dim}, {"dim": dim, "keepdim": True}, {"dim": 1}, {"dim": -1, "keepdim": True}):
        print(f"{options}: {tuple(x.shape)} becomes {tuple(root_mean_square(x, **options).shape)}")
    report = hodiff.check(root_mean_square, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
