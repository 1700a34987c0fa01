r"""Lesson 32: log-sum-exp, stable, with rows of -∞.

$$ y = \log \sum_i e^{x_i} = m + \log \sum_i e^{x_i - m}, \qquad m = \max_i x_i $$

$$ \bar x_i = p_i \, \bar y, \quad \dot y = \sum_i p_i \, \dot x_i, \qquad p_i = e^{x_i - y}, \qquad
   y_{ij} = p_i [i = j] - p_i p_j $$

Without the shift, $e^{1000}$ overflows, and the sum for three numbers of -1000 is 0. With a shift by the largest number
both are right, and the shift changes no derivative. Masks produce rows that are all -∞. Their largest number is -∞, and
-∞ - (-∞) is NaN, so the shift has to be a finite number, 0 for such a row. The same holds for y in backward. A row
without any term has y = -∞, and gradient 0 by convention, at every order.

A `torch.where` around the result would not help, as `main` shows: the NaN of the branch that is not taken becomes 0 ·
NaN in the gradient. Instead, the *argument* is made safe.

    python examples/functions/32_logsumexp.py

Exercise: write `LogAddExp`, $\log(e^a + e^b)$ with broadcasting, that is right where a, b or both are -∞.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lesson_tools import print_table
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([[0.5, -1.2, 2.0], [0.3, -0.7, 1.1]], dtype=torch.float64),)
HARD = {
    "large": [1000.0, 1000.0, 999.0],
    "small": [-1000.0, -1000.0, -1000.0],
    "one is -∞": [0.0, 1.0, -math.inf],
    "all are -∞": [-math.inf] * 3,
}


class LogSumExp(Function):
    r"""$\log \sum_i e^{x_i}$ over the last dimension. Saves input and output; forward mode saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Shift by the largest number, or by 0 if that is infinite."""
        shift = finite(x.amax(-1, keepdim=True))
        return (x - shift).exp().sum(-1).log() + shift.squeeze(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$p_i ȳ$."""
        x, y = ctx.saved_tensors
        return probabilities(x, y) * cotangent.unsqueeze(-1)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        r"""$\sum_i p_i ẋ_i$."""
        (x,) = ctx.saved_tensors
        return (probabilities(x, LogSumExp.apply(x)) * tangent).sum(-1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Move the batch to the front."""
        del info
        return LogSumExp.apply(x.movedim(in_dims[0], 0)), 0


def finite(y: Tensor) -> Tensor:
    """Return the number, or 0 if it is infinite."""
    return torch.where(y.isinf(), 0.0, y)


def probabilities(x: Tensor, y: Tensor) -> Tensor:
    """Compute $e^{x - y}$; where y is -∞ every x is, and so it is 0."""
    return (x - finite(y).unsqueeze(-1)).exp()


def naive(x: Tensor) -> Tensor:
    """Compute the formula without a shift."""
    return x.exp().sum(-1).log()


def covered_up(x: Tensor) -> Tensor:
    """Compute the shifted formula, with a `torch.where` around the result."""
    shift = x.amax(-1)
    return torch.where(shift.isinf(), shift, (x - shift.unsqueeze(-1)).exp().sum(-1).log() + shift)


def draw(figure: Any) -> None:
    """log(eˣ + eˣ), which is x + log 2, by the unshifted formula and shifted: the first ends at ±700."""
    axes = figure.add_subplot()
    x = torch.linspace(-1200, 1200, 49, dtype=torch.float64)
    pairs = torch.stack([x, x], -1)
    axes.plot(x, LogSumExp.apply(pairs), label="shifted")
    axes.plot(x, naive(pairs), "x", label="as it stands, where it is finite")
    axes.set_xlabel("x")
    axes.legend()


def main() -> hodiff.Report:
    """Print values and gradients at hard rows, and check LogSumExp by every route to third order."""
    rows = []
    for name, numbers in HARD.items():
        x = torch.tensor(numbers, dtype=torch.float64)
        gradient = [round(each, 3) for each in torch.func.grad(LogSumExp.apply)(x).tolist()]
        rows.append((name, f"{naive(x):g}", f"{LogSumExp.apply(x):g}", gradient))
    print_table(("row", "as it stands", "shifted", "gradient of the latter"), rows)
    gradient = torch.func.grad(covered_up)(torch.full((3,), -math.inf)).tolist()
    print(f"torch.where around the result, gradient where all are -∞: {gradient}")
    report = hodiff.check(LogSumExp, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
