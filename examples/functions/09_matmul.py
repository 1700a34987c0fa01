r"""Lesson 9: the product of matrices, with a batching rule by hand.

$$ Y = A B, \qquad \bar A = \bar Y B^T, \quad \bar B = A^T \bar Y, \qquad \dot Y = \dot A B + A \dot B $$

Y is linear in A and in B, so its only second derivative is the mixed one, $D^2 Y[\dot A, \dot B] = \dot A \dot B$.

The batching rule is written by hand again. The batch dimension of each input may be anywhere, or None. The rule moves
it to the front, where `@` expects it, and repeats an input without batch (`expand` copies nothing). The second part of
the result is the batch dimension of the output.

    python examples/functions/09_matmul.py

Exercise: write `QuadraticForm`, $x^T A x$ for x of shape (n,) and A of shape (n, n), with its batching rule by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[0.5, -1.2]], dtype=torch.float64),
    torch.tensor([[2.0, 0.3], [-0.7, 1.1]], dtype=torch.float64),
)


class MatMul(Function):
    """$A B$. Saves the inputs."""

    @staticmethod
    def forward(A: Tensor, B: Tensor) -> Tensor:
        """Compute the value; leading dimensions are a batch, the same for both."""
        return A @ B

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """$Ȳ B^T$ and $A^T Ȳ$, where needed."""
        A, B = ctx.saved_tensors
        A_needed, B_needed = ctx.needs_input_grad
        return cotangent @ B.mT if A_needed else None, A.mT @ cotangent if B_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, A_tangent: Tensor, B_tangent: Tensor) -> Tensor:
        """Apply the product rule."""
        A, B = ctx.saved_tensors
        return A_tangent @ B + A @ B_tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], *inputs: Tensor) -> tuple[Tensor, int]:
        """Move the batch of each input to the front."""
        A, B = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip(inputs, in_dims, strict=True)
        )
        return MatMul.apply(A, B), 0


def draw(figure: Any) -> None:
    """The Hessian of the sum of A B, each number weighted: only the mixed block is not 0."""
    A, B = INPUTS
    H = hodiff.HessianOperator(
        lambda p: (MatMul.apply(p["A"], p["B"]) * torch.tensor([1.0, 2.0])).sum(), {"A": A, "B": B}
    )
    hodiff.plot.hessian(H, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check MatMul by every route to third order."""
    report = hodiff.check(MatMul, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
