r"""Cross-entropy with probabilities as targets: $\ell = \sum_c q_c\,(\log \sum_k e^{x_k} - x_c)$, lean at every order.

The q need not sum to 1; with $Q = \sum_c q_c$, the Hessian with respect to x is $Q$ times the Hessian of log-sum-exp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.functions.softmax.logsumexp import LogSumExpProduct
from hodiff.functions.softmax.softmax import LogSoftmax, Softmax
from hodiff.rules.blockwise import allows_in_place, block_by_block
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction
from hodiff.torch_internals.tensors import broadcast_shape


class SoftCrossEntropy(SavingFunction):
    """The loss of each sample, of size 1 along the dimension, with probabilities. Saves logits and probabilities.

    A term with probability 0 is 0, whatever the logit.
    """

    saves = 2
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, q: Tensor, dim: int, limit: int | None) -> Tensor:
        """Compute $ℓ$ from log-probabilities that exist for one block at a time."""
        return block_by_block(partial(_losses, dim=dim), dim, limit, x, q, reduces=True)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Return $g (Q p - q)$ for x and $-g log p$ for q."""
        if cotangent is None:
            return None, None, None, None
        x, q = ctx.saved_tensors
        dim, limit = ctx.rest
        by_x = by_q = None
        if ctx.needs_input_grad[0]:
            # Copy an expanded cotangent, as from a sum: forward mode could not write a tangent in its layout.
            by_x = SoftCrossEntropyGradient.call(x, q, cotangent.contiguous(), dim, limit).sum_to_size(x.shape)
        if ctx.needs_input_grad[1]:
            by_q = (-cotangent * LogSoftmax.call(x, dim)).sum_to_size(q.shape)
        return by_x, by_q, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, q_t: Tensor | None, *_: None) -> Tensor:
        """Apply the product rule."""
        x, q = ctx.saved_tensors
        dim = ctx.rest[0]
        terms = []
        if x_t is not None:
            mean = (Softmax.call(x, dim) * x_t).sum(dim, keepdim=True)
            terms.append((q * (mean - x_t)).sum(dim, keepdim=True))
        if q_t is not None:
            terms.append(-(q_t * LogSoftmax.call(x, dim)).sum(dim, keepdim=True))
        return (terms[0] if len(terms) == 1 else terms[0] + terms[1]).expand(ctx.shape)


class SoftCrossEntropyGradient(SavingFunction):
    r"""$g\,(Q p - q)$ with broadcasting. Saves its three tensors."""

    saves = 3
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, q: Tensor, g: Tensor, dim: int, limit: int | None) -> Tensor:
        """Compute the gradient block by block."""
        return block_by_block(partial(_gradient, dim=dim), dim, limit, x, q, g)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> Any:
        """Return $g Q J v$ for x, $g (⟨p,v⟩ - v)$ for q and $Q ⟨p,v⟩ - ⟨q,v⟩$ for g."""
        if v is None:
            return (None,) * 5
        x, q, g = ctx.saved_tensors
        dim, limit = ctx.rest
        needs = ctx.needs_input_grad
        by_x = by_q = by_g = None
        if needs[0]:
            scale = g * _mass(x, q, dim)
            by_x = LogSumExpProduct.call(x, scale, v, dim, False, limit).sum_to_size(x.shape)
        if needs[1] or needs[2]:
            centred = (Softmax.call(x, dim) * v).sum(dim, keepdim=True) - v
            by_q = (g * centred).sum_to_size(q.shape) if needs[1] else None
            by_g = (q * centred).sum_to_size(g.shape) if needs[2] else None
        return by_x, by_q, by_g, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, q_t: Tensor | None, g_t: Tensor | None, *_: None) -> Tensor:
        """Apply the product rule."""
        x, q, g = ctx.saved_tensors
        dim, limit = ctx.rest
        terms = []
        if x_t is not None:
            terms.append(LogSumExpProduct.call(x, g * _mass(x, q, dim), x_t, dim, False, limit))
        if q_t is not None:
            terms.append(SoftCrossEntropyGradient.call(x, q_t, g, dim, limit))
        if g_t is not None:
            terms.append(SoftCrossEntropyGradient.call(x, q, g_t, dim, limit))
        return sum(terms[1:], terms[0]).expand(ctx.shape)


def _mass(x: Tensor, q: Tensor, dim: int) -> Tensor:
    """Compute $Q$."""
    return q.sum(dim, keepdim=True) if q.shape[dim] == x.shape[dim] else x.shape[dim] * q


def _losses(x: Tensor, q: Tensor, dim: int) -> Tensor:
    logs = torch.log_softmax(x, dim)
    impossible = (q == 0) & logs.isneginf()
    return -(q * torch.where(impossible, 0, logs)).sum(dim, keepdim=True)


def _gradient(x: Tensor, q: Tensor, g: Tensor, dim: int) -> Tensor:
    y = torch.softmax(x, dim) * _mass(x, q, dim)
    if y.shape != broadcast_shape(y.shape, q.shape, g.shape) or not allows_in_place(x, q, g):
        return (y - q) * g
    return y.sub_(q).mul_(g)
