r"""Lesson 12: a linear layer, which skips gradients that are not needed.

$$ Y = X W^T + b, \qquad \bar X = \bar Y W, \quad \bar W = \bar Y^T X, \quad \bar b = \sum_i \bar Y_i, \qquad
   \dot Y = \dot X W^T + X \dot W^T + \dot b $$

This combines lessons 9 and 10; the only second derivative is the mixed one of X and W. The gradient of a matrix costs
as much as `forward`. The first layer of a network needs no $\bar X$, a frozen layer no $\bar W$: `needs_input_grad`
reports this, and None costs nothing. The bias is not saved, as no rule needs it.

    python examples/functions/12_linear.py

Exercise: write `Bilinear`, $x^T W y$ for x of shape (m,), W of shape (m, n) and y of shape (n,), and compute no
gradient that is not needed.
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
    torch.tensor([0.1, -0.4], dtype=torch.float64),
)


class Linear(Function):
    """$X W^T + b$. Saves X and W."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, W: Tensor, b: Tensor) -> Tensor:
        """Compute the value for X of shape (n, d), W of shape (m, d) and b of shape (m,)."""
        return X @ W.T + b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Save X and W."""
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute each gradient where it is needed."""
        X, W = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        return (
            cotangent @ W if X_needed else None,
            cotangent.T @ X if W_needed else None,
            cotangent.sum(0) if b_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, X_tangent: Tensor, W_tangent: Tensor, b_tangent: Tensor) -> Tensor:
        """Apply the product rule."""
        X, W = ctx.saved_tensors
        return X_tangent @ W.T + X @ W_tangent.T + b_tangent


def draw(figure: Any) -> None:
    """The Hessian of the sum of outputs: only the mixed block of X and W is not 0, and b has no entries."""
    p = dict(zip("XWb", INPUTS, strict=True))
    H = hodiff.HessianOperator(lambda p: Linear.apply(p["X"], p["W"], p["b"]).sum(), p)
    hodiff.plot.hessian(H, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Linear by every route to third order."""
    report = hodiff.check(Linear, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
