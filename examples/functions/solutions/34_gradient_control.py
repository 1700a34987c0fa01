"""Solution of exercise 34: a tensor is saved, as any tensor is, and gets None."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Reversal(Function):
    """The identity with Jacobian $-λ I$. Saves λ."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, strength: Tensor) -> Tensor:
        """Copy."""
        del strength
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save what may change; if it is changed in place, torch says so."""
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """$-λ ȳ$."""
        (strength,) = ctx.saved_tensors
        return -strength * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, strength_tangent: Tensor | None) -> Tensor:
        """$-λ ẋ$."""
        del strength_tangent
        (strength,) = ctx.saved_tensors
        return -strength * tangent


def scheduled(x: Tensor, strength: Tensor) -> Tensor:
    """Gradient reversal by a constant."""
    return Reversal.apply(x, strength.detach())
