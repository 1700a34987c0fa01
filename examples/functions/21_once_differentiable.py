r"""Lesson 21, a defect: a Function that may be differentiated only once.

$$ y = \sin x, \qquad y' = \cos x, \qquad y'' = -\sin x $$

`@once_differentiable` runs backward without a graph. Differentiating the gradient raises an error only if the incoming
cotangent requires a gradient. In a gradient penalty it does not: torch then treats the second derivative as zero,
without a warning. hodiff's transforms raise a `RouteError` instead. The check below tests torch alone
(`correct=False`), and names the decorator. The fix is to remove the decorator, because the formula is differentiable.
If backward calls a kernel, see lesson 20.

    python examples/functions/21_once_differentiable.py

Exercise: a missing second derivative should raise. Write `LoudSine`, whose backward computes the gradient by a second
Function that raises a `RuntimeError` when it is differentiated, also in a gradient penalty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Sine(Function):
    r"""$\sin x$, right to first order only. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        r"""$\cos(x) ȳ$, without a graph."""
        (x,) = ctx.saved_tensors
        return x.cos() * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        r"""$\cos(x) ẋ$."""
        (x,) = ctx.saved_tensors
        return x.cos() * tangent


def draw(figure: Any) -> None:
    """The derivatives by torch alone: the second is zero, and differs from the dots, SciPy's differences."""
    hodiff.plot.derivatives(Sine.apply, -4, 4, order=2, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Print what the check finds."""
    report = hodiff.check(Sine, INPUTS, order=3, correct=False)
    print(report)
    return report


if __name__ == "__main__":
    main()
