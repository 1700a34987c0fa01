r"""Lesson 19: attention, from the parts of earlier lessons.

$$ S = \tfrac{1}{\sqrt d} Q K^T, \qquad P = \operatorname{softmax}(S), \qquad Y = P V $$

$$ \bar V = P^T \bar Y, \quad \bar S = J(\bar Y V^T), \quad \bar Q = \tfrac{1}{\sqrt d} \bar S K, \quad
   \bar K = \tfrac{1}{\sqrt d} \bar S^T Q, \qquad
   \dot Y = J(\dot S) \, V + P \dot V, \quad \dot S = \tfrac{1}{\sqrt d} (\dot Q K^T + Q \dot K^T) $$

The derivative of softmax is $J(Z) = P \circ (Z - \sum_j (P \circ Z)_j)$ row by row, which is symmetric and so works in
both directions. P is as large as the square of the sequence length. It is therefore not saved, but recomputed from the
inputs, which also makes the second derivative right (lesson 4 shows another solution). Torch's fused attention has no
second derivative; `hodiff.functions` has an attention that never stores P, with masks and dropout.

    python examples/functions/19_attention.py

Exercise: make it causal: write `CausalAttention`, in which query i attends to the keys 0 to i alone. All derivatives
have to be finite.
"""

from __future__ import annotations

from typing import Any

import torch
from lesson_tools import saved_bytes
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[0.5, -1.2]], dtype=torch.float64),
    torch.tensor([[2.0, 0.3], [-0.7, 1.1]], dtype=torch.float64),
    torch.tensor([[0.4], [-0.9]], dtype=torch.float64),
)


class Attention(Function):
    """$P V$ for Q (n, d), K (m, d) and V (m, e). Saves the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """Compute the value."""
        return probabilities(Q, K) @ V

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Recompute P, then each gradient where it is needed."""
        Q, K, V = ctx.saved_tensors
        Q_needed, K_needed, V_needed = ctx.needs_input_grad
        P = probabilities(Q, K)
        S_cotangent = softmax_derivative(P, cotangent @ V.mT) / Q.shape[-1] ** 0.5
        return (
            S_cotangent @ K if Q_needed else None,
            S_cotangent.mT @ Q if K_needed else None,
            P.mT @ cotangent if V_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, Q_tangent: Tensor, K_tangent: Tensor, V_tangent: Tensor) -> Tensor:
        """Apply the product rule twice."""
        Q, K, V = ctx.saved_tensors
        P = probabilities(Q, K)
        S_tangent = (Q_tangent @ K.mT + Q @ K_tangent.mT) / Q.shape[-1] ** 0.5
        return softmax_derivative(P, S_tangent) @ V + P @ V_tangent


def probabilities(Q: Tensor, K: Tensor) -> Tensor:
    """Compute the attention of each query to each key; rows sum to 1."""
    return torch.softmax(Q @ K.mT / Q.shape[-1] ** 0.5, -1)


def softmax_derivative(P: Tensor, Z: Tensor) -> Tensor:
    """Multiply Z by the Jacobian of softmax at the output P."""
    return P * (Z - (P * Z).sum(-1, keepdim=True))


def draw(figure: Any) -> None:
    """Memory kept for backward by the length of the sequence: torch's operators keep P, whose size is a square."""
    axes = figure.add_subplot()
    lengths = [32, 64, 128, 256, 512]
    plain: Any = lambda Q, K, V: probabilities(Q, K) @ V  # noqa: E731  # one formula, beside its text
    for name, f in {"by torch's operators": plain, "this Function": Attention.apply}.items():
        kept = []
        for n in lengths:
            Q, K, V = (torch.randn(n, 16, requires_grad=True) for _ in range(3))
            kept.append((saved_bytes(f, Q, K, V) + 3 * Q.nbytes) / 1000)
        axes.loglog(lengths, kept, ".-", label=name)
    axes.set_xlabel("length of the sequence")
    axes.set_ylabel("kilobytes kept, inputs included")
    axes.legend()


def main() -> hodiff.Report:
    """Check Attention by every route to third order."""
    report = hodiff.check(Attention, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
