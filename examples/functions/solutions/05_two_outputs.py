"""Solution of exercise 5: each output depends on both inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Cartesian(Function):
    r"""$(r \cos φ, r \sin φ)$. Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(r: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the values."""
        return r * angle.cos(), r * angle.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, x_cotangent: Tensor, y_cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return one gradient per input, where it is needed."""
        r, angle = ctx.saved_tensors
        r_needed, angle_needed = ctx.needs_input_grad
        return (
            angle.cos() * x_cotangent + angle.sin() * y_cotangent if r_needed else None,
            r * (angle.cos() * y_cotangent - angle.sin() * x_cotangent) if angle_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, r_tangent: Tensor, angle_tangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return one tangent per output."""
        r, angle = ctx.saved_tensors
        return (
            angle.cos() * r_tangent - r * angle.sin() * angle_tangent,
            angle.sin() * r_tangent + r * angle.cos() * angle_tangent,
        )
