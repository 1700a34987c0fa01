r"""Lesson 17: an integer power, with an argument that is not a tensor.

$$ y = x^n, \qquad y' = n x^{n-1}, \qquad y'' = n (n - 1) x^{n-2} $$

n is a Python int: it is an attribute of `ctx`, and its gradient and its tangent are None. `backward` and `jvp` call the
Function with n - 1, and stop at n = 0. The formula `n * x**n / x` would be NaN at 0; with n - 1, every derivative is
right at 0, too.

    python examples/functions/17_non_tensor_arguments.py

Exercise: write `Polynomial.apply(x, coefficients)`, $\sum_k c_k x^k$ for a tuple of numbers, which calls itself for the
slope.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, 0.0, -1.2], dtype=torch.float64), 4)


class Power(Function):
    """$x^n$ for an int n of 0 or more. Saves the input."""

    @staticmethod
    def forward(x: Tensor, n: int) -> Tensor:
        """Compute the value."""
        return x**n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Save the tensor, and keep the int."""
        x, ctx.n = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Return one gradient, and None for n."""
        (x,) = ctx.saved_tensors
        return slope(x, ctx.n) * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, n_tangent: None) -> Tensor:
        """Multiply by the slope; the tangent of n is always None."""
        del n_tangent
        (x,) = ctx.saved_tensors
        return slope(x, ctx.n) * x_tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, n: int) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Power.apply(x, n), in_dims[0]


def slope(x: Tensor, n: int) -> Tensor:
    """$n x^{n-1}$."""
    return n * Power.apply(x, n - 1) if n else torch.zeros_like(x)


def draw(figure: Any) -> None:
    """The fourth power and its derivatives, which are right at 0, too; the dots are SciPy's differences."""
    hodiff.plot.derivatives(lambda x: Power.apply(x, 4), -1.2, 1.2, order=3, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Power by every route to third order."""
    report = hodiff.check(Power, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
