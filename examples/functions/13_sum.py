r"""Lesson 13: a sum, whose gradient is a repetition.

$$ y = \sum_i x_i, \qquad \bar x_i = \bar y, \qquad \dot y = \sum_i \dot x_i $$

This is lesson 10 in reverse: the backward of a sum is a repetition. The rule needs only the shape of x. The shape is
not a tensor, so it may be an attribute of `ctx`. `expand` repeats without a copy.

    python examples/functions/13_sum.py

Exercise: write `CumulativeSum` over the last dimension; going back, it sums from the other end.
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


class Sum(Function):
    r"""$\sum_i x_i$ over the last dimension. Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the shape."""
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Repeat the cotangent."""
        return cotangent.unsqueeze(-1).expand(ctx.shape)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Apply the function itself, as it is linear."""
        return tangent.sum(-1)


def draw(figure: Any) -> None:
    """The Jacobian: each sum has a row of ones, which backward turns into repetitions."""
    J = torch.func.jacrev(Sum.apply)(INPUTS[0]).reshape(2, 4)
    draw_matrix(figure.add_subplot(), J, "Jacobian", ["y₀", "y₁"], ["x₀₀", "x₀₁", "x₁₀", "x₁₁"])


def main() -> hodiff.Report:
    """Check Sum by every route to third order."""
    report = hodiff.check(Sum, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
