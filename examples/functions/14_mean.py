r"""Lesson 14: a mean, and dimensions counted from the end.

$$ y = \frac{1}{n} \sum_i x_i, \qquad \bar x_i = \frac{\bar y}{n}, \qquad \dot y = \frac{1}{n} \sum_i \dot x_i $$

This is lesson 13 divided by the count. The batching rule is one line: the Function works on the last dimension, counted
from the end, so a batch dimension at the front does not interfere.

    python examples/functions/14_mean.py

Exercise: write `Variance`, $\frac{1}{n} \sum_i (x_i - \bar x)^2$ over the last dimension, with $\bar x$ the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from lesson_tools import draw_matrix
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([[0.5, -1.2], [2.0, 0.3]], dtype=torch.float64),)


class Mean(Function):
    r"""$\frac{1}{n} \sum_i x_i$ over the last dimension. Saves nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.mean(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the shape."""
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Repeat the cotangent, divided by the count."""
        return (cotangent / ctx.shape[-1]).unsqueeze(-1).expand(ctx.shape)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Apply the function itself, as it is linear."""
        return tangent.mean(-1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Move the batch to the front."""
        del info
        return Mean.apply(x.movedim(in_dims[0], 0)), 0


def draw(figure: Any) -> None:
    """The Jacobian: that of the sum, divided by the count."""
    J = torch.func.jacrev(Mean.apply)(INPUTS[0]).reshape(2, 4)
    draw_matrix(figure.add_subplot(), J, "Jacobian", ["y₀", "y₁"], ["x₀₀", "x₀₁", "x₁₀", "x₁₁"])


def main() -> hodiff.Report:
    """Check Mean by every route to third order."""
    report = hodiff.check(Mean, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
