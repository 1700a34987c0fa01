r"""Lesson 33: swish with a β that is learned, and why silu cannot save its output.

$$ y = x \, σ(βx), \qquad y_x = σ + βx \, σ (1 - σ), \quad y_β = x^2 σ (1 - σ), \qquad
   \bar x = y_x \, \bar y, \quad \bar β = \sum_{\text{repeated}} y_β \, \bar y $$

β is a parameter of the layer or of each channel: it broadcasts, and its gradient is summed to its shape (lesson 11).
Both slopes call torch's sigmoid, whose derivatives are right; at large arguments lesson 6 would keep more digits.

Exp and tanh save their output (lessons 3 and 7), which the next layer saves anyway. This requires an invertible
function, so that each y has one slope. Silu, which is swish with β = 1, falls until x = -1.278 and then rises. It
therefore takes every value between its minimum -0.278 and 0 twice, with slopes of opposite sign: `main` shows two
points with one output. A formula in y cannot distinguish them, so the input has to be saved.

    python examples/functions/33_swish.py

Exercise: softplus, $\log(1 + e^x)$, can be inverted. Write `Softplus` so that it saves its output alone; its slope is a
function of y that keeps its digits where y is small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[0.5, -1.2, 2.0], [0.3, -0.7, 1.1]], dtype=torch.float64),
    torch.tensor([1.0, 0.4, 1.7], dtype=torch.float64),
)


class Swish(Function):
    """$x σ(βx)$ with broadcasting. Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beta: Tensor) -> Tensor:
        """Compute the value."""
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute gradients in the shapes of the inputs, where needed."""
        x, beta = ctx.saved_tensors
        x_needed, beta_needed = ctx.needs_input_grad
        return (
            (x_slope(x, beta) * cotangent).sum_to_size(x.shape) if x_needed else None,
            (beta_slope(x, beta) * cotangent).sum_to_size(beta.shape) if beta_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, beta_tangent: Tensor) -> Tensor:
        """Apply the chain rule."""
        x, beta = ctx.saved_tensors
        return x_slope(x, beta) * x_tangent + beta_slope(x, beta) * beta_tangent


def x_slope(x: Tensor, beta: Tensor) -> Tensor:
    """$σ + βx σ (1 - σ)$."""
    return torch.sigmoid(beta * x) * (1 + beta * x * torch.sigmoid(-beta * x))


def beta_slope(x: Tensor, beta: Tensor) -> Tensor:
    """$x^2 σ (1 - σ)$."""
    return x * x * torch.sigmoid(beta * x) * torch.sigmoid(-beta * x)


def silu(x: Tensor) -> Tensor:
    """Compute swish with β = 1."""
    return Swish.apply(x, torch.ones((), dtype=x.dtype))


def twins(level: float = -0.2) -> list[Tensor]:
    """Find the two points where silu has that value, by bisection on each side of the minimum."""
    points = []
    for low, high in ((-10.0, -1.278), (0.0, -1.278)):  # silu is above the level at `low`, below it at `high`
        for _ in range(60):
            middle = (low + high) / 2
            above = silu(torch.tensor(middle, dtype=torch.float64)) > level
            low, high = (middle, high) if above else (low, middle)
        points.append(torch.tensor(low, dtype=torch.float64))
    return points


def draw(figure: Any) -> None:
    """Silu takes the value -0.2 twice; the tangents there have slopes of opposite sign."""
    axes = figure.add_subplot()
    x = torch.linspace(-6, 1, 200, dtype=torch.float64)
    axes.plot(x, silu(x), label="silu")
    axes.axhline(-0.2, color="gray", linewidth=0.7, label="y = -0.2")
    for point in twins():
        slope = torch.func.grad(silu)(point)
        near = point + torch.tensor([-0.6, 0.6])
        axes.plot(near, -0.2 + slope * (near - point), color="C1")
        axes.annotate(f"slope {slope:.3f}", (point, -0.2), (point - 0.4, 0.1))
    axes.set_xlabel("x")
    axes.set_ylim(-0.4, 0.5)
    axes.legend(loc="upper left")


def main() -> hodiff.Report:
    """Print two points with one output, and check Swish by every route to third order."""
    for point in twins():
        print(f"silu({point:.4f}) = {silu(point):.4f}, slope {torch.func.grad(silu)(point):+.4f}")
    report = hodiff.check(Swish, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
