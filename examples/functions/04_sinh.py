r"""Lesson 4: the hyperbolic sine, which returns its residual as an output.

$$ y = \sinh x, \qquad y' = \cosh x, \qquad y'' = \sinh x, \qquad y''' = \cosh x $$

Here `forward` also computes $c = \cosh x$, which backward needs. An intermediate like c is neither input nor output, so
no graph connects it to x. If `setup_context` saved it, the second derivative would treat it as a constant. Returned as
an output, it is part of the graph. Then it has its own cotangent, which backward adds:

$$ \bar x = c \, \bar y + y \, \bar c, \qquad \dot y = c \, \dot x, \qquad \dot c = y \, \dot x. $$

A plain function as a wrapper hides the second output.

    python examples/functions/04_sinh.py

Exercise: write `root_of_one_plus_square(x)`, $\sqrt{1 + x^2}$, by a Function that returns $1 / y$ as a second output,
with which $\bar x = \frac{x}{y} \, \bar y$ needs no division; mind its cotangent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Sinh(Function):
    r"""$(\sinh x, \cosh x)$. Saves both outputs; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value and the residual."""
        return x.sinh(), x.cosh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, y_cotangent: Tensor, c_cotangent: Tensor) -> Tensor:
        """Add the contribution through the residual."""
        y, c = ctx.saved_tensors
        return c * y_cotangent + y * c_cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return one tangent per output."""
        (x,) = ctx.saved_tensors
        y, c = Sinh.apply(x)
        return c * tangent, y * tangent


def sinh(x: Tensor) -> Tensor:
    """Compute the hyperbolic sine."""
    return Sinh.apply(x)[0]


def draw(figure: Any) -> None:
    """The hyperbolic sine and its derivatives, of which every second is the same; the dots are SciPy's differences."""
    hodiff.plot.derivatives(sinh, -2, 2, order=3, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check sinh, as users call it, by every route to third order."""
    report = hodiff.check(sinh, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
