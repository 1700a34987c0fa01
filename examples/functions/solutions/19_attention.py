"""Solution of exercise 19: masked entries have probability 0 exactly, and the rules do not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class CausalAttention(Function):
    """Attention $P V$ for Q (n, d), K (n, d) and V (n, e), with P = 0 above the diagonal. Saves the inputs."""

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
    """Compute the probabilities. Each query attends at least to itself, so that no row is all -∞."""
    scores = Q @ K.mT / Q.shape[-1] ** 0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1)


def softmax_derivative(P: Tensor, Z: Tensor) -> Tensor:
    """Multiply Z by the Jacobian of softmax at the output P."""
    return P * (Z - (P * Z).sum(-1, keepdim=True))
