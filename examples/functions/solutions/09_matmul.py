"""Solution of exercise 9: the batching rule moves the batches of both inputs to the front."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class QuadraticForm(Function):
    """$x^T A x$. Saves the inputs."""

    @staticmethod
    def forward(x: Tensor, A: Tensor) -> Tensor:
        """Compute the value; leading dimensions are a batch, the same for both."""
        return (x * times(A, x)).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute $(A + A^T) x ȳ$ and $x x^T ȳ$, where needed."""
        x, A = ctx.saved_tensors
        x_needed, A_needed = ctx.needs_input_grad
        return (
            times(A + A.mT, x) * cotangent[..., None] if x_needed else None,
            x[..., :, None] * x[..., None, :] * cotangent[..., None, None] if A_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, A_tangent: Tensor) -> Tensor:
        """Apply the product rule."""
        x, A = ctx.saved_tensors
        return (x_tangent * times(A + A.mT, x) + x * times(A_tangent, x)).sum(-1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], *inputs: Tensor) -> tuple[Tensor, int]:
        """Move the batch of each input to the front."""
        x, A = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip(inputs, in_dims, strict=True)
        )
        return QuadraticForm.apply(x, A), 0


def times(A: Tensor, x: Tensor) -> Tensor:
    """Compute $A x$, batch by batch."""
    return (A @ x[..., None])[..., 0]
