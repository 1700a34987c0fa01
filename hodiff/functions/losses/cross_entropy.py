r"""Cross-entropy with class indices: the loss of each sample and its gradient, lean at every order.

With smoothing ε and C classes the loss of a sample is
$\ell = \log \sum_c e^{x_c} - (1 - \varepsilon)\,x_t - \tfrac{\varepsilon}{C} \sum_c x_c$: log-sum-exp and a linear
term. So its Hessian is the Hessian of log-sum-exp, and products with it are `LogSumExpProduct`, without the target.

The target has size 1 along the dimension of classes, and so have losses and cotangents.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.functions.softmax.logsumexp import LogSumExpProduct
from hodiff.functions.softmax.softmax import Softmax
from hodiff.rules.blockwise import allows_in_place, block_by_block, without
from hodiff.rules.elementwise import summed_to
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction
from hodiff.torch_internals.tensors import broadcast_shape


class CrossEntropy(SavingFunction):
    """The loss of each sample, with class indices. Saves logits and target, and no copy of either."""

    saves = 2
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, target: Tensor, ignore: int, smoothing: float, dim: int, limit: int | None) -> Tensor:
        """Compute $ℓ$ from log-probabilities that exist for one block at a time."""
        losses = partial(_losses, ignore=ignore, smoothing=smoothing, dim=dim)
        return block_by_block(losses, dim, limit, x, target, reduces=True)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Multiply the cotangent by $p$ minus the smoothed target."""
        if cotangent is None or not ctx.needs_input_grad[0]:
            return (None,) * 6
        x, target = ctx.saved_tensors
        counted = torch.where(target == ctx.rest[0], 0, cotangent)
        gradient = CrossEntropyGradient.call(x, target, counted, *ctx.rest)
        return summed_to(x.shape, gradient), None, None, None, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Compute the inner product of the tangent with $p$ minus the smoothed target."""
        x, target = ctx.saved_tensors
        ignore, smoothing, dim, _ = ctx.rest
        mean = (Softmax.call(x, dim) * tangent).sum(dim, keepdim=True)
        change = mean - _expected(tangent, class_of(target, ignore), smoothing, dim)
        return torch.where(target == ignore, 0, change).expand(ctx.shape)


class CrossEntropyGradient(SavingFunction):
    r"""$g\,(p - (1 - \varepsilon)\,e_t - \varepsilon / C)$ with broadcasting. Saves logits, target and g.

    Its derivative with respect to the logits costs three passes over the result; the derivative with respect to $g$ is
    computed on demand only.
    """

    saves = 3
    broadcasts = True

    @staticmethod
    def forward(
        x: Tensor, target: Tensor, g: Tensor, ignore: int, smoothing: float, dim: int, limit: int | None
    ) -> Tensor:
        """Compute the gradient; no other tensor of its size exists."""
        gradient = partial(_gradient, ignore=ignore, smoothing=smoothing, dim=dim)
        return block_by_block(gradient, dim, limit, x, target, g)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> Any:
        """Return $g J v$ for the logits, and the inner product of v with a sample's gradient for g."""
        if v is None:
            return (None,) * 7
        x, target, g = ctx.saved_tensors
        ignore, smoothing, dim, limit = ctx.rest
        by_x = by_g = None
        if ctx.needs_input_grad[0]:
            by_x = LogSumExpProduct.call(x, g, v, dim, False, limit).sum_to_size(x.shape)
        if ctx.needs_input_grad[2]:
            mean = (Softmax.call(x, dim) * v).sum(dim, keepdim=True)
            by_g = (mean - _expected(v, class_of(target, ignore), smoothing, dim)).sum_to_size(g.shape)
        return by_x, None, by_g, None, None, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, _: None, g_t: Tensor | None, *__: None) -> Tensor:
        """Apply the product rule."""
        x, target, g = ctx.saved_tensors
        dim, limit = ctx.rest[2:]
        terms = []
        if x_t is not None:
            terms.append(LogSumExpProduct.call(x, g, x_t, dim, False, limit))
        if g_t is not None:
            terms.append(CrossEntropyGradient.call(x, target, g_t, *ctx.rest))
        return (terms[0] if len(terms) == 1 else terms[0] + terms[1]).expand(ctx.shape)


def class_of(target: Tensor, ignore: int) -> Tensor:
    """Return the target as int64 indices, with class 0 for ignored samples."""
    return torch.where(target == ignore, 0, target).long()


def _expected(v: Tensor, index: Tensor, smoothing: float, dim: int) -> Tensor:
    """Mean of v under the smoothed target, whose classes are int64 indices."""
    shape = broadcast_shape(v.shape, index.shape)
    hit = v.expand(shape).gather(dim, index.expand(without(dim, shape)))
    return (1 - smoothing) * hit + smoothing * v.mean(dim, keepdim=True) if smoothing else hit


def _losses(x: Tensor, target: Tensor, ignore: int, smoothing: float, dim: int) -> Tensor:
    logs = torch.log_softmax(x, dim)
    if _is_matrix(x, target, dim) and not smoothing and allows_in_place(x, target):
        # One kernel in place of six operators, which take most of the time of a small call.
        return F.nll_loss(logs, target.squeeze(1).long(), ignore_index=ignore, reduction="none").unsqueeze(1)
    ignored = target == ignore
    index = torch.where(ignored, 0, target).long()
    return torch.where(ignored, 0, -_expected(logs, index, smoothing, dim))


def _is_matrix(x: Tensor, target: Tensor, dim: int) -> bool:
    return dim == -1 and x.dim() == 2 and x.shape[:1] == target.shape[:-1]


def _gradient(x: Tensor, target: Tensor, g: Tensor, ignore: int, smoothing: float, dim: int) -> Tensor:
    shape = broadcast_shape(x.shape, target.shape)
    index = class_of(target, ignore).expand(without(dim, shape))
    hit = torch.full(index.shape, smoothing - 1, dtype=x.dtype, device=x.device)
    y = torch.softmax(x, dim)
    if x.shape != shape or not allows_in_place(x, target, g):
        y = y - smoothing / x.shape[dim] if smoothing else y
        return y.expand(shape).scatter_add(dim, index, hit) * g
    # Work in place on the softmax; only the product with a batch of g needs another tensor.
    y = (y.sub_(smoothing / x.shape[dim]) if smoothing else y).scatter_add_(dim, index, hit)
    return y.mul_(g) if g.shape == target.shape or broadcast_shape(shape, g.shape) == shape else y * g
