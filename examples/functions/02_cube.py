r"""Lesson 2: the cube, whose backward is differentiated twice.

$$ y = x^3, \qquad y' = 3x^2, \qquad y'' = 6x, \qquad y''' = 6 $$

No code contains y'' or y''': torch differentiates `3 * x * x * cotangent` with respect to x and the cotangent. A rule
is right to every order if its formula is right and every operator in it is differentiable.

All rules here are torch operators, so `generate_vmap_rule` can derive the batching rule that lesson 1 wrote by hand.

    python examples/functions/02_cube.py

Exercise: write `Quartic`, $x^4$, with a slope whose own slope you never write down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Cube(Function):
    """$x^3$. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x * x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$3x^2 ȳ$."""
        (x,) = ctx.saved_tensors
        return 3 * x * x * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$3x^2 ẋ$."""
        (x,) = ctx.saved_tensors
        return 3 * x * x * tangent


def draw(figure: Any) -> None:
    """The cube and its derivatives; the dots are SciPy's differences."""
    hodiff.plot.derivatives(Cube.apply, -1.5, 1.5, order=3, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Print the derivatives at 2, and check Cube by every route to third order."""
    f, x = Cube.apply, torch.tensor(2.0)
    for name in ("y", "y'", 'y"', "y\"'"):
        print(f"{name:4} at 2 is {f(x).item():g}")
        f = torch.func.grad(f)
    report = hodiff.check(Cube, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
