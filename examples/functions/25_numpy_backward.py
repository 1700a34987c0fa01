r"""Lesson 25, a defect: NumPy in backward.

$$ y = \sin x, \qquad y' = \cos x, \qquad y'' = -\sin x $$

`backward` computes the cosine by NumPy, which torch does not trace: the slope is a constant to the second derivative.
In plain autograd its term is lost without a warning, as `main` shows with $\sin^2 x$. A Triton or C++ kernel in
backward does the same. Inside `torch.func`, which the routes of the check use, NumPy raises. The fix is lesson 20: make
the slope a Function.

    python examples/functions/25_numpy_backward.py

Exercise: fix it and keep NumPy: write `Sine` so that every value is computed by `numpy.sin` or `numpy.cos`, and every
order is right, in plain autograd and in batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Sine(Function):
    r"""$\sin x$, right to first order only. Saves the input."""

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
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        r"""$\cos(x) ȳ$ by NumPy, which is the defect."""
        (x,) = ctx.saved_tensors
        return torch.as_tensor(np.cos(x.detach().numpy())) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        r"""$\cos(x) ẋ$."""
        (x,) = ctx.saved_tensors
        return x.cos() * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Sine.apply(x), in_dims[0]


def draw(figure: Any) -> None:
    """The second derivative of sin² x by torch, and the exact one."""
    axes = figure.add_subplot()
    x = torch.linspace(-3, 3, 121, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((Sine.apply(x) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    axes.plot(x.detach(), second, label="by torch, a term is lost")
    axes.plot(x.detach(), 2 * (2 * x.detach()).cos(), "--", label="2 cos 2x")
    axes.set_xlabel("x")
    axes.legend()


def main() -> hodiff.Report:
    """Print a second derivative that lacks a term, and what the check finds."""
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Sine.apply(x) ** 2, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient, x)
    print(f"second derivative of sin(x)^2 at 0.5: {second:.4f}, where 2 cos(2x) is {2 * (2 * x).cos():.4f}")
    report = hodiff.check(Sine, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
