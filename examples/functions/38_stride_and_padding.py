r"""Lesson 38: a convolution with stride and padding.

$$ y_{bol} = \sum_{ct} w_{oct} \, \tilde x_{b, c, s l + t}, \qquad \tilde x = x \text{ between } p \text{ zeros} $$

This is lesson 16 with a stride s and a padding p. Both gradients are still convolutions, and each option has a
counterpart:

- $\bar x$ is the transposed convolution with the same s and p. If s does not divide $L + 2p - k$, the last numbers of x
  were never read; their gradient is 0, and `output_padding` adds them.
- $\bar w$ is the convolution of x with $\bar y$, in which stride becomes *dilation*: neighbours in $\bar y$ come from
  places of x that are s apart. Numbers that were never read would add entries beyond the width k, which are cut off.

Both are bilinear again, so they are differentiable to every order.

    python examples/functions/38_stride_and_padding.py

Exercise: give it `dilation` as well: $\tilde x_{b, c, s l + d t}$. Its counterpart in $\bar w$ is a stride.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[[0.5, -1.2, 2.0, 0.3, -0.7, 1.1]]], dtype=torch.float64),
    torch.tensor([[[0.4, -0.9, 1.3]]], dtype=torch.float64),
    2,
    1,
)


class Conv1d(Function):
    """Convolution of x (batch, channels, length) with w (outputs, channels, width). Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
        """Compute the value."""
        return F.conv1d(x, w, stride=stride, padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
        """Save the tensors, and keep the numbers."""
        x, w, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Compute a transposed convolution and a dilated one, where needed."""
        x, w = ctx.saved_tensors
        x_needed, w_needed, *_ = ctx.needs_input_grad
        return (
            input_gradient(cotangent, w, ctx.stride, ctx.padding, x.shape[-1]) if x_needed else None,
            weight_gradient(x, cotangent, ctx.stride, ctx.padding, w.shape[-1]) if w_needed else None,
            None,
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, w_tangent: Tensor, *_: None) -> Tensor:
        """Apply the product rule."""
        x, w = ctx.saved_tensors
        options = {"stride": ctx.stride, "padding": ctx.padding}
        return F.conv1d(x_tangent, w, **options) + F.conv1d(x, w_tangent, **options)


def input_gradient(cotangent: Tensor, w: Tensor, stride: int, padding: int, length: int) -> Tensor:
    """Compute the transposed convolution, with zeros for numbers that were never read."""
    reached = (cotangent.shape[-1] - 1) * stride + w.shape[-1] - 2 * padding
    return F.conv_transpose1d(cotangent, w, stride=stride, padding=padding, output_padding=length - reached)


def weight_gradient(x: Tensor, cotangent: Tensor, stride: int, padding: int, width: int) -> Tensor:
    """Compute the convolution with batch and channels exchanged, cut to the width."""
    swapped = F.conv1d(x.transpose(0, 1), cotangent.transpose(0, 1), dilation=stride, padding=padding)
    return swapped.transpose(0, 1)[..., :width]


def draw(figure: Any) -> None:
    """The Jacobian by x of six numbers: one row per output, shifted by the stride; unread numbers have zero columns."""
    x, w, *_ = INPUTS
    for k, (stride, padding) in enumerate(((1, 0), (2, 0), (2, 1))):
        J = hodiff.jacobian(lambda x, s=stride, p=padding: Conv1d.apply(x, w, s, p).flatten())(x).reshape(-1, 6)
        axes = figure.add_subplot(1, 3, k + 1)
        axes.imshow(J.numpy(), cmap="bwr", vmin=-1.5, vmax=1.5)
        axes.set_title(f"stride {stride}, padding {padding}", fontsize="medium")
        axes.set_xlabel("number of x")
        axes.set_yticks(range(len(J)))


def main() -> hodiff.Report:
    """Print gradients of inputs that are not all read, and check Conv1d by every route to third order."""
    x, w, *_ = INPUTS
    for stride, padding in ((1, 0), (2, 0), (3, 1)):
        gradient = torch.func.grad(lambda x, s=stride, p=padding: Conv1d.apply(x, w, s, p).sum())(x)
        print(f"stride {stride}, padding {padding}: {[round(each, 1) for each in gradient.flatten().tolist()]}")
    report = hodiff.check(Conv1d, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
