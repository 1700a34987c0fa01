"""Solution of exercise 3: the slope is y log 2."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Exp2(Function):
    r"""$2^x$. Saves the output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.exp2()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the output for reverse mode, and the input for forward mode."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        (y,) = ctx.saved_tensors
        return math.log(2) * y * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return math.log(2) * Exp2.apply(x) * tangent
