r"""Lesson 10: adding a bias, whose gradient is a sum.

$$ Y_{ij} = X_{ij} + b_j, \qquad \bar X = \bar Y, \quad \bar b_j = \sum_i \bar Y_{ij}, \qquad
   \dot Y_{ij} = \dot X_{ij} + \dot b_j $$

Each number of b is used in every row, so its gradient is the sum over the rows: the backward of a repetition is a sum.
The function is linear, so all second derivatives vanish, and nothing has to be saved.

    python examples/functions/10_bias_add.py

Exercise: write `ChannelBias`, which adds b of shape (c,) to x of shape (n, c, l).
"""

from __future__ import annotations

from typing import Any

import torch
from lesson_tools import draw_matrix
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[0.5, -1.2], [2.0, 0.3]], dtype=torch.float64),
    torch.tensor([-0.7, 1.1], dtype=torch.float64),
)


class BiasAdd(Function):
    """$X + b$ for X of shape (n, d) and b of shape (d,). Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, b: Tensor) -> Tensor:
        """Compute the value."""
        return X + b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the cotangent, and its sum over the rows."""
        X_needed, b_needed = ctx.needs_input_grad
        return cotangent if X_needed else None, cotangent.sum(0) if b_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, X_tangent: Tensor, b_tangent: Tensor) -> Tensor:
        """Apply the function itself, as it is linear."""
        return X_tangent + b_tangent


def draw(figure: Any) -> None:
    """The Jacobian: each number of b is in two of the outputs, and its gradient adds up two cotangents."""
    X, b = INPUTS
    by_X, by_b = (J.reshape(4, -1) for J in torch.func.jacrev(BiasAdd.apply, (0, 1))(X, b))
    columns = ["X₀₀", "X₀₁", "X₁₀", "X₁₁", "b₀", "b₁"]
    draw_matrix(figure.add_subplot(), torch.cat([by_X, by_b], 1), "Jacobian", ["Y₀₀", "Y₀₁", "Y₁₀", "Y₁₁"], columns)


def main() -> hodiff.Report:
    """Check BiasAdd by every route to third order."""
    report = hodiff.check(BiasAdd, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
