r"""Lesson 23, a defect: a tangent that is off by a factor.

$$ y = x^3, \qquad y' = 3x^2, \qquad y'' = 6x $$

This is the cube of lesson 2, with a 6 in `jvp`. Every program that only calls `backward` works, and `gradcheck` and
`gradgradcheck` of `torch.autograd` pass, as they do not test forward mode by default. hodiff compares all routes, and
finds that the routes through `jvp` are wrong.

    python examples/functions/23_doubled_tangent.py

Exercise: write a test that finds the defect without differences and without a formula: `transposed(function, x)`, True
if `jvp` and `backward` are transposes, $\langle u, J v \rangle = \langle J^T u, v \rangle$ for random u and v.
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
    """$x^3$, wrong in forward mode. Saves the input."""

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
        """$6x^2 ẋ$, which is the defect."""
        (x,) = ctx.saved_tensors
        return 6 * x * x * tangent


def draw(figure: Any) -> None:
    """The slope by backward and by jvp."""
    axes = figure.add_subplot()
    x = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    axes.plot(x, torch.vmap(torch.func.grad(Cube.apply))(x), label="slope by backward")
    axes.plot(x, torch.func.jvp(Cube.apply, (x,), (torch.ones_like(x),))[1], "--", label="slope by jvp")
    axes.set_xlabel("x")
    axes.legend()


def main() -> hodiff.Report:
    """Print what the check finds."""
    report = hodiff.check(Cube, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
