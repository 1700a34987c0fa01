r"""Lesson 22, a defect: a slope that is computed in setup_context.

$$ y = x^2, \qquad y' = 2x, \qquad y'' = 2 $$

This is the square of lesson 1, but it saves 2x instead of x, to avoid a product in backward. `setup_context` runs
outside of the graph, so 2x is not connected to x. The gradient is right, and `torch.autograd.gradcheck` passes, but
torch's second derivative is zero by every route, without a warning. `hodiff.hvp` raises a `RouteError` that names
`Square.backward`. The fix is lesson 1 (save the input) or lesson 4 (make it an output).

    python examples/functions/22_constant_slope.py

Exercise: fix it by lesson 4: write `square(x)`, whose Function returns $2x$ as a second output and saves that.
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
    """$x^2$, wrong from second order on. Saves the slope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Compute the slope, which is the defect."""
        (x,) = inputs
        ctx.save_for_backward(2 * x)
        ctx.save_for_forward(2 * x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$2x ȳ$."""
        (slope,) = ctx.saved_tensors
        return slope * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$2x ẋ$."""
        (slope,) = ctx.saved_tensors
        return slope * tangent


def draw(figure: Any) -> None:
    """The dots, SciPy's differences, show the true second derivative; the curve is torch's."""
    hodiff.plot.derivatives(Square.apply, -2, 2, order=2, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Print what the check finds."""
    report = hodiff.check(Square, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
