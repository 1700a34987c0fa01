"""Solution of exercise 34: a strength that is a tensor is saved like any tensor, and its gradient is None."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Reversal(Function):
    """Identity with Jacobian $-λ I$. Saves λ."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, strength: Tensor) -> Tensor:
        """Copy the input."""
        del strength
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save λ, which may change; torch detects changes in place."""
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Compute $-λ ȳ$."""
        (strength,) = ctx.saved_tensors
        return -strength * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, strength_tangent: Tensor | None) -> Tensor:
        """Compute $-λ ẋ$."""
        del strength_tangent
        (strength,) = ctx.saved_tensors
        return -strength * tangent


def scheduled(x: Tensor, strength: Tensor) -> Tensor:
    """Reverse the gradient by a constant strength."""
    return Reversal.apply(x, strength.detach())
