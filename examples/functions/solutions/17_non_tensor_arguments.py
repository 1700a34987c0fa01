"""Solution of exercise 17: the derivative of a polynomial is a polynomial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Polynomial(Function):
    r"""$\sum_k c_k x^k$ for a tuple of numbers. Saves the input."""

    @staticmethod
    def forward(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
        """Compute the value by Horner's rule."""
        y = torch.zeros_like(x)
        for coefficient in reversed(coefficients):
            y = y * x + coefficient
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[float, ...]], output: Tensor) -> None:
        """Save the tensor, and keep the numbers."""
        x, ctx.coefficients = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Return one gradient, and None for the numbers."""
        (x,) = ctx.saved_tensors
        return slope(x, ctx.coefficients) * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, coefficients_tangent: None) -> Tensor:
        """Multiply by the slope; the tangent of the numbers is always None."""
        del coefficients_tangent
        (x,) = ctx.saved_tensors
        return slope(x, ctx.coefficients) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, Any], x: Tensor, coefficients: tuple[float, ...]) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Polynomial.apply(x, coefficients), in_dims[0]


def slope(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    r"""Compute $\sum_k k c_k x^{k-1}$."""
    return Polynomial.apply(x, tuple(k * each for k, each in enumerate(coefficients) if k))
