r"""Lesson 35: external code, with a measured error.

$$ T(θ) = \frac{2π}{\operatorname{agm}(1, \cos \tfrac{θ}{2})}, \qquad
   T' \approx \frac{T(θ + h) - T(θ - h)}{2h} $$

T is the period of a pendulum of amplitude θ, by Gauss's arithmetic-geometric mean: a loop of plain Python, which
represents any program that torch cannot trace. Its derivative comes from differences. A large step h has a truncation
error of $h^2$, a small step a rounding error of $ε / h$; no step gives more than about two thirds of the digits.
SciPy's `derivative` shrinks the step, extrapolates, and estimates its error. `main` prints both, and the true slope by
elliptic integrals.

backward calls the Function for the next order: `Period.apply(x, order)` is the derivative of that order, by differences
of the order below. Each order loses digits, as the estimates show. A formula for the derivative would be exact at every
order (the exercise). `hodiff.functions.numpy_function` does all of this for functions of any shape.

    python examples/functions/35_external_code.py

Exercise: Airy's function solves $A''(x) = x A(x)$. Write `Airy.apply(x, order)` for orders 0 and 1 around
`scipy.special.airy` (whose first two results are A and A'), so that derivatives of every order are exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from lesson_tools import print_table
from scipy.differentiate import derivative
from scipy.special import ellipe, ellipk
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, 1.2], dtype=torch.float64), 0)


def period(angle: float) -> float:
    """Compute the period, as external code."""
    a, b = 1.0, math.cos(angle / 2)
    for _ in range(6):
        a, b = (a + b) / 2, math.sqrt(a * b)
    return 2 * math.pi / a


def differences(angles: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the derivative of an order and SciPy's error estimate, by differences of the order below."""
    if order == 0:
        values = np.vectorize(period, otypes=[float])(angles)
        return values, np.finfo(float).eps * np.abs(values)
    result = derivative(lambda each: differences(each, order - 1)[0], angles, initial_step=0.25)
    return result.df, result.error


class Period(Function):
    """Derivative of T of a given order. Saves the input."""

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:
        """Compute outside of torch."""
        return torch.from_numpy(differences(x.detach().numpy(), order)[0]).to(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Save the tensor, and keep the order."""
        x, ctx.order = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Call the Function, not NumPy."""
        (x,) = ctx.saved_tensors
        return Period.apply(x, ctx.order + 1) * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, order_tangent: None) -> Tensor:
        """Call the Function, not NumPy."""
        del order_tangent
        (x,) = ctx.saved_tensors
        return Period.apply(x, ctx.order + 1) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, order: int) -> tuple[Tensor, int]:
        """Keep the batch dimension: every number is independent."""
        del info
        return Period.apply(x, order), in_dims[0]


def true_slope(angle: float) -> float:
    """Compute T' by elliptic integrals: T = 4 K(m) and m = sin²(θ/2)."""
    m = math.sin(angle / 2) ** 2
    by_m = (ellipe(m) - (1 - m) * ellipk(m)) / (2 * m * (1 - m))
    return float(4 * by_m * math.sin(angle) / 2)


def draw(figure: Any) -> None:
    """The error of a central difference by its step, and that of SciPy's extrapolation with its own estimate."""
    axes = figure.add_subplot()
    steps = np.logspace(-12, -0.5, 93)
    errors = [abs((period(1.2 + h) - period(1.2 - h)) / (2 * h) - true_slope(1.2)) for h in steps]
    slope, estimate = differences(np.array([1.2]), 1)
    axes.loglog(steps, errors, ".", label="central difference")
    axes.axhline(max(abs(slope[0] - true_slope(1.2)), 1e-17), color="C1", label="SciPy, extrapolated")
    axes.axhline(estimate[0], color="C1", linestyle=":", label="SciPy's estimate of its error")
    axes.set_xlabel("step h")
    axes.set_ylabel("error of T'(1.2)")
    axes.legend()


def main() -> hodiff.Report:
    """Print slopes with their estimated and true errors, and check Period to second order."""
    rows = []
    for angle in (0.5, 1.2, 2.0, 2.8):
        slope, estimate = (float(each[0]) for each in differences(np.array([angle]), 1))
        rows.append((angle, f"{slope:.12f}", f"{estimate:.0e}", f"{abs(slope - true_slope(angle)):.0e}"))
    print_table(("angle", "slope of T", "estimated error", "true error"), rows)
    report = hodiff.check(Period, INPUTS, order=2)
    print(report)
    return report


if __name__ == "__main__":
    main()
