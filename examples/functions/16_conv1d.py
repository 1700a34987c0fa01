r"""Lesson 16: a convolution, whose gradients are convolutions.

$$ y_{bol} = \sum_{ct} w_{oct} \, x_{b, c, l + t} $$

$$ \bar x_{bcj} = \sum_{ot} w_{oct} \, \bar y_{b, o, j - t}, \qquad
   \bar w_{oct} = \sum_{bl} \bar y_{bol} \, x_{b, c, l + t}, \qquad \dot y = \dot x * w + x * \dot w $$

A convolution is bilinear, like the product of lesson 9, so the only second derivative is the mixed one. The gradient of
x is a transposed convolution with the same weight. The gradient of w is a convolution of x with $\bar y$, in which
batch and channels are exchanged. `hodiff.functions` has a convolution with stride, padding, dilation and groups.

    python examples/functions/16_conv1d.py

Exercise: write `TransposedConv1d`, `torch.nn.functional.conv_transpose1d(x, w)` for x of shape (batch, inputs, length)
and w of shape (inputs, outputs, width), whose gradients are convolutions, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lesson_tools import draw_matrix
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[[0.5, -1.2, 2.0, 0.3]]], dtype=torch.float64),
    torch.tensor([[[-0.7, 1.1]]], dtype=torch.float64),
)


class Conv1d(Function):
    """Convolution of x (batch, channels, length) with w (outputs, channels, width). Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        """Compute the value."""
        return F.conv1d(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute two convolutions, where needed."""
        x, w = ctx.saved_tensors
        x_needed, w_needed = ctx.needs_input_grad
        return (
            F.conv_transpose1d(cotangent, w) if x_needed else None,
            F.conv1d(x.transpose(0, 1), cotangent.transpose(0, 1)).transpose(0, 1) if w_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, w_tangent: Tensor) -> Tensor:
        """Apply the product rule."""
        x, w = ctx.saved_tensors
        return F.conv1d(x_tangent, w) + F.conv1d(x, w_tangent)


def draw(figure: Any) -> None:
    """The Jacobian by x: each row has the same weights, shifted; its transpose is the transposed convolution."""
    x, w = INPUTS
    J = torch.func.jacrev(Conv1d.apply)(x, w).reshape(3, 4)
    draw_matrix(figure.add_subplot(), J, "Jacobian by x", ["y₀", "y₁", "y₂"], ["x₀", "x₁", "x₂", "x₃"])


def main() -> hodiff.Report:
    """Check Conv1d by every route to third order."""
    report = hodiff.check(Conv1d, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
