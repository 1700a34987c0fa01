r"""Lesson 11: broadcasting in general.

$$ z = x y, \qquad \bar x = \sum_{\text{repeated}} \bar z \, y, \quad
   \bar y = \sum_{\text{repeated}} \bar z \, x, \qquad
   \dot z = \dot x \, y + x \, \dot y $$

The only second derivative is $z_{xy} = 1$. Torch repeats x and y to a common shape, by new dimensions in front and by
expanding sizes of 1. The rule of lesson 10 holds for each repetition, and `sum_to_size` applies it: it sums to the
shape of the input. A gradient in any other shape is an error, or worse, broadcasts again.

    python examples/functions/11_broadcasting.py

Exercise: write `Divide`, $x / y$ with broadcasting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[0.5], [-1.2]], dtype=torch.float64),
    torch.tensor([2.0, 0.3, -0.7], dtype=torch.float64),
)


class Multiply(Function):
    """$x y$ with broadcasting. Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        """Compute the value."""
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute gradients in the shapes of the inputs."""
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return (
            (cotangent * y).sum_to_size(x.shape) if x_needed else None,
            (cotangent * x).sum_to_size(y.shape) if y_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        """Apply the product rule; tangents broadcast as the inputs do."""
        x, y = ctx.saved_tensors
        return x_tangent * y + x * y_tangent


def draw(figure: Any) -> None:
    """The Hessian of the sum of x y: only the mixed derivatives of x and y are not 0."""
    x, y = INPUTS
    H = hodiff.HessianOperator(lambda p: Multiply.apply(p["x"], p["y"]).sum(), {"x": x, "y": y})
    hodiff.plot.hessian(H, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Multiply by every route to third order."""
    report = hodiff.check(Multiply, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
