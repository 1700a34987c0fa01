r"""Lesson 8: the rectifier, and a point that is not smooth.

$$ y = \max(x, 0), \qquad y' = [x > 0], \qquad y'' = y''' = 0 $$

At 0 there is no derivative; this Function uses 0, as torch does. Here $y > 0$ exactly where $x > 0$, so the output is
enough. The comparison cuts the graph, which is right here: the slope does not depend on x.

A check at the kink cannot agree with finite differences, and `hodiff.check` reports it as `non-smooth`.

    python examples/functions/08_relu.py

Exercise: write `LeakyRelu`, x where $x > 0$ and $0.1 x$ elsewhere, which saves its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)
KINK = (torch.tensor([0.0], dtype=torch.float64),)


class Relu(Function):
    r"""$\max(x, 0)$, of slope 0 at 0. Saves the output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the output for reverse mode, and the input for forward mode."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$[y > 0] ȳ$."""
        (y,) = ctx.saved_tensors
        return (y > 0) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$[x > 0] ẋ$."""
        (x,) = ctx.saved_tensors
        return (x > 0) * tangent


def draw(figure: Any) -> None:
    """The rectifier and its slope; the dots are SciPy's differences, of which one is wrong, at the kink."""
    hodiff.plot.derivatives(Relu.apply, -1, 1, order=1, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Relu by every route to third order, and print what a check at the kink finds."""
    report = hodiff.check(Relu, INPUTS, order=3)
    print(report)
    print("\nAt the kink:")
    for finding in hodiff.check(Relu, KINK, order=1).findings:
        print(finding)
    return report


if __name__ == "__main__":
    main()
