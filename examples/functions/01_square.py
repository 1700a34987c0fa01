r"""Lesson 1: the square, and the five parts of a Function.

$$ y = x^2, \qquad y' = 2x, \qquad y'' = 2, \qquad y''' = 0 $$

With the cotangent $\bar y = \partial L / \partial y$ that comes from the loss L, and the tangent $\dot x$ that comes
from the inputs,

$$ \bar x = 2x \, \bar y, \qquad \dot y = 2x \, \dot x. $$

`forward` computes, and knows nothing of derivatives. `setup_context` saves what the rules will read; it computes
nothing, because nothing that it computes is part of a graph. `backward` and `jvp` are the two formulas above, written
in torch operators, so that they can be differentiated in turn: that is where the second derivative comes from. `vmap`
says what to do with a batch; an elementwise function treats the batch as one more dimension.

`nestable_jvp` lets forward mode run inside forward mode; torch alone takes x for a constant there.

    python examples/functions/01_square.py

Exercise: write `Sine` in the same five parts, for $\sin x$.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Square(Function):
    """$x^2$. Saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Pull the cotangent back."""
        (x,) = ctx.saved_tensors
        return 2 * x * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Push the tangent forward."""
        (x,) = ctx.saved_tensors
        return 2 * x * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        """Leave the batch where it is."""
        del info
        return Square.apply(x), in_dims[0]


def draw(figure: Any) -> None:
    """The square and its derivatives; the dots are SciPy's differences."""
    hodiff.plot.derivatives(Square.apply, -2, 2, order=3, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Square by every route to third order."""
    report = hodiff.check(Square, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
