"""Solution of exercise 6: the slope of softplus is the sigmoid, whose derivatives are stable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Softplus(Function):
    r"""$\log(1 + e^x)$. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return torch.logaddexp(x, torch.zeros_like(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * tangent


class Sigmoid(Function):
    r"""$σ(x)$, as in the lesson. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * Sigmoid.apply(-x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * Sigmoid.apply(-x) * tangent
