"""Solution of exercise 18: a missing argument has no gradient and no tangent."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class Scale(Function):
    """Function $w x + b$ for tensors of one shape; w and b may be None. Saves w, and x if w is given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        """Compute the value; a copy of x if both are missing."""
        y = x.clone() if w is None else w * x
        return y if b is None else y + b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None], output: Tensor) -> None:
        """Save x only with w: without w no rule needs x."""
        x, w, _ = inputs
        ctx.save_for_backward(None if w is None else x, w)
        ctx.save_for_forward(None if w is None else x, w)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return one gradient per argument, None for a missing argument."""
        x, w = ctx.saved_tensors
        x_needed, w_needed, b_needed = ctx.needs_input_grad
        through = cotangent if w is None else w * cotangent
        return through if x_needed else None, x * cotangent if w_needed else None, cotangent if b_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, w_tangent: Tensor | None, b_tangent: Tensor | None) -> Tensor:
        """Add the tangents of given arguments; a tangent that is returned unchanged is copied."""
        x, w = ctx.saved_tensors
        tangent = x_tangent.clone() if w is None else w * x_tangent
        if w_tangent is not None:
            tangent = tangent + x * w_tangent
        return tangent if b_tangent is None else tangent + b_tangent


def scale(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """Compute $w x + b$, where w and b are optional."""
    return Scale.apply(x, w, b)
