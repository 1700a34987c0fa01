r"""Lesson 3: the exponential, which saves its output.

$$ y = e^x, \qquad y' = y, \qquad y'' = y, \qquad y''' = y $$

The next layer usually saves the output anyway, so saving it costs nothing, and $\bar x = y \, \bar y$ needs no second
exp. In backward, a saved output is connected to x, so the second derivative is right.

In forward mode, a saved output is not connected to x: while `jvp` runs, y does not yet have a tangent of an enclosing
forward pass. Therefore `jvp` uses the saved input, and calls the Function again.

    python examples/functions/03_exp.py

Exercise: write `Exp2`, $2^x$, which saves its output as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Exp(Function):
    """$e^x$. Saves the output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$y ȳ$."""
        (y,) = ctx.saved_tensors
        return y * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$y ẋ$."""
        (x,) = ctx.saved_tensors
        return Exp.apply(x) * tangent


def draw(figure: Any) -> None:
    """The exponential and its derivatives, which are all the same curve; the dots are SciPy's differences."""
    hodiff.plot.derivatives(Exp.apply, -2, 1.5, order=3, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Exp by every route to third order."""
    report = hodiff.check(Exp, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
