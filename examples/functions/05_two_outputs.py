r"""Lesson 5: two inputs and two outputs.

$$ p = x^2 + y^2, \qquad q = x y $$

$$ \bar x = 2x \, \bar p + y \, \bar q, \quad \bar y = 2y \, \bar p + x \, \bar q, \qquad
   \dot p = 2x \, \dot x + 2y \, \dot y, \quad \dot q = y \, \dot x + x \, \dot y $$

The second derivatives are constants: $p_{xx} = p_{yy} = 2$ and $q_{xy} = 1$.

`backward` gets one cotangent per output and returns one gradient per input. Torch fills in zeros for outputs that the
loss does not use and for inputs without a tangent. An input that needs no gradient gets None, at no cost.

    python examples/functions/05_two_outputs.py

Exercise: write `Cartesian`, which maps r and φ to $r \cos φ$ and $r \sin φ$.
"""

from __future__ import annotations

from typing import Any

import torch
from lesson_tools import draw_matrix
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64), torch.tensor([2.0, 0.3], dtype=torch.float64))


class SquaresAndProduct(Function):
    """$(x^2 + y^2, x y)$. Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the values."""
        return x * x + y * y, x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, p_cotangent: Tensor, q_cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return one gradient per input, where it is needed."""
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return (
            2 * x * p_cotangent + y * q_cotangent if x_needed else None,
            2 * y * p_cotangent + x * q_cotangent if y_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return one tangent per output."""
        x, y = ctx.saved_tensors
        return 2 * (x * x_tangent + y * y_tangent), y * x_tangent + x * y_tangent


def draw(figure: Any) -> None:
    """The Hessians of both outputs, which are constants."""
    x, y = (each[0] for each in INPUTS)
    for k, name in enumerate(("x² + y²", "x y")):
        H = hodiff.hessian_matrix(lambda xy, k=k: SquaresAndProduct.apply(xy[0], xy[1])[k], torch.stack([x, y]))
        draw_matrix(figure.add_subplot(1, 2, k + 1), H, f"Hessian of {name}", "xy", "xy")


def main() -> hodiff.Report:
    """Check SquaresAndProduct by every route to third order."""
    report = hodiff.check(SquaresAndProduct, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
