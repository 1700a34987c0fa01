"""Solution of exercise 4: 1 / y is an output, and its cotangent adds to the gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class RootOfOnePlusSquare(Function):
    r"""$(y, 1 / y)$ with $y = \sqrt{1 + x^2}$. Saves input and second output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value and the residual."""
        y = (1 + x * x).sqrt()
        return y, 1 / y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, y_cotangent: Tensor, r_cotangent: Tensor) -> Tensor:
        """Compute $x r ȳ - x r^3 r̄$, with $r = 1 / y$."""
        x, r = ctx.saved_tensors
        return x * r * (y_cotangent - r * r * r_cotangent)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return one tangent per output."""
        (x,) = ctx.saved_tensors
        _, r = RootOfOnePlusSquare.apply(x)
        return x * r * tangent, -x * r**3 * tangent


def root_of_one_plus_square(x: Tensor) -> Tensor:
    """Return the value alone."""
    return RootOfOnePlusSquare.apply(x)[0]
