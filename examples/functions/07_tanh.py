r"""Lesson 7: the hyperbolic tangent, and a choice between memory and accuracy.

$$ y = \tanh x, \qquad y' = (1 - y)(1 + y), \qquad y'' = -2 y y', \qquad y''' = (4 y^2 - 2 y') \, y' $$

Like exp in lesson 3, it saves the output, which the next layer keeps anyway. Unlike the sigmoid of lesson 6, it then
has to subtract: y is rounded to a relative ε, so $1 - y$ has a relative error of $ε / (1 - y)$. This is harmless where
the slope is added to slopes of size 1, as in training a network. Where the slope itself is the result, all digits may
be lost.

    python examples/functions/07_tanh.py

Exercise: write `Tanh` so that it keeps its digits where the slope is small: within $10^{-14}$ of $1 / \cosh^2 x$ at x =
20.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Tanh(Function):
    r"""$\tanh x$. Saves the output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$(1 - y)(1 + y) ȳ$."""
        (y,) = ctx.saved_tensors
        return (1 - y) * (1 + y) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$(1 - y)(1 + y) ẋ$."""
        (x,) = ctx.saved_tensors
        y = Tanh.apply(x)
        return (1 - y) * (1 + y) * tangent


def draw(figure: Any) -> None:
    """The relative error of the slope, which grows as the slope falls."""
    axes = figure.add_subplot()
    x = torch.linspace(0.1, 20, 200, dtype=torch.float64)
    exact = 1 / x.cosh() ** 2
    axes.semilogy(x, exact, label="slope")
    axes.semilogy(x, (torch.vmap(torch.func.grad(Tanh.apply))(x) / exact - 1).abs(), ".", label="its relative error")
    axes.set_xlabel("x")
    axes.legend()


def main() -> hodiff.Report:
    """Print what the saved output costs in digits, and check Tanh by every route to third order."""
    for point in (1.0, 5.0, 10.0, 15.0, 20.0):
        x = torch.tensor(point, dtype=torch.float64)
        exact = 1 / x.cosh() ** 2
        error = (torch.func.grad(Tanh.apply)(x) / exact - 1).abs().item()
        print(f"slope at {point:2g}: {exact.item():.1e}, relative error {error:.0e}")
    report = hodiff.check(Tanh, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
