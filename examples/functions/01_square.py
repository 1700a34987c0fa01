r"""Lesson 1: the square, and the five parts of a Function.

$$ y = x^2, \qquad y' = 2x, \qquad y'' = 2, \qquad y''' = 0 $$

The loss L gives the cotangent $\bar y = \partial L / \partial y$, and the inputs the tangent $\dot x$. The two rules
are

$$ \bar x = 2x \, \bar y, \qquad \dot y = 2x \, \dot x. $$

`forward` computes the value only. `setup_context` saves what the rules need; it computes nothing, because its
computations are not part of any graph. `backward` and `jvp` are the two formulas above in torch operators, so that they
can be differentiated again: this gives the second derivative. `vmap` handles a batch; an elementwise function treats
the batch as one more dimension.

`nestable_jvp` allows forward mode inside forward mode; torch alone treats x as a constant there.

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
        """Keep the batch dimension."""
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
