r"""Log-sum-exp along one dimension and its first two derivatives, each closed under differentiation.

$$ f(x) = \log \sum_c e^{x_c}, \qquad \nabla f = p = \operatorname{softmax}(x), \qquad
   \nabla^2 f = \operatorname{diag}(p) - p p^\top $$

`LogSumExp` computes $f$; `LogSumExpGradient` and `LogSumExpProduct` compute its derivatives, times a factor and a
vector. They save the input and recompute $p$ from it block by block, so that no copy of $p$ exists between forward and
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.functions.softmax.softmax import Softmax, third_derivative, weighted_product
from hodiff.kernels import fused
from hodiff.rules.blockwise import block_of, blocks
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction
from hodiff.torch_internals.tensors import broadcast_shape


class LogSumExp(SavingFunction):
    """The Function behind `logsumexp`; the dimension is negative and kept. Saves its input and output."""

    reads_output = True
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        """Compute $f(x)$."""
        return fused.logsumexp(x) if dim == -1 and fused.takes(x) else torch.logsumexp(x, dim, keepdim=True)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None]:
        """Multiply the cotangent by $p$; the result is zero for empty sums."""
        if cotangent is None or not ctx.needs_input_grad[0]:
            return None, None
        x, y = ctx.saved_tensors
        (dim,) = ctx.rest
        return LogSumExpGradient.call(x, torch.where(y.detach().isneginf(), 0, cotangent), dim, True), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Compute the mean of the tangent under $p$."""
        (x,) = ctx.saved_tensors
        (dim,) = ctx.rest
        live = LogSumExp.call(x.detach(), dim).isneginf().logical_not().to(x.dtype)
        return (LogSumExpGradient.call(x, live, dim, True) * tangent).sum(dim, keepdim=True)


class LogSumExpGradient(SavingFunction):
    """$s p$ for a factor s of size 1 along the dimension. Saves both inputs."""

    saves = 2
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, dim: int, bounded: bool) -> Tensor:
        """Compute $s p$."""
        if dim == -1 and scale.shape == (*x.shape[:-1], 1) and fused.takes(x, scale):
            return fused.softmax(x, scale, bounded=bounded)
        return probabilities(x, dim, bounded) * scale

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> Any:
        """Return $s J v$ for x and $⟨p, v⟩$ for s."""
        if v is None:
            return None, None, None, None
        x, scale = ctx.saved_tensors
        dim, bounded = ctx.rest
        by_x = by_scale = None
        if not ctx.needs_input_grad[1]:
            by_x = LogSumExpProduct.call(x, scale, v, dim, bounded, None).sum_to_size(x.shape)
            return by_x, None, None, None
        # Both need the probabilities and the mean; compute them once.
        if _suits_rows(dim, x, scale, v):
            by_x, by_scale = fused.softmax_product(x, scale, v, bounded=bounded)
            return by_x, by_scale, None, None
        p = Softmax.call(bound(x) if bounded else x, dim)
        weighted = p * v
        mean = weighted.sum(dim, keepdim=True)
        if ctx.needs_input_grad[0]:
            by_x = (scale * (weighted - p * mean)).sum_to_size(x.shape)
        by_scale = mean.sum_to_size(scale.shape)
        return by_x, by_scale, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, scale_t: Tensor | None, *_: None) -> Tensor:
        """Apply the product rule."""
        x, scale = ctx.saved_tensors
        dim, bounded = ctx.rest
        terms = []
        if x_t is not None:
            terms.append(LogSumExpProduct.call(x, scale, x_t, dim, bounded, None))
        if scale_t is not None:
            terms.append(LogSumExpGradient.call(x, scale_t, dim, bounded))
        return (terms[0] if len(terms) == 1 else terms[0] + terms[1]).expand(ctx.shape)


class LogSumExpProduct(SavingFunction):
    r"""$s J v = s\,(p \circ v - p\,\langle p, v \rangle)$ with broadcasting. Saves its three tensors."""

    saves = 3
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, v: Tensor, dim: int, bounded: bool, limit: int | None) -> Tensor:
        """Compute the product; probabilities exist for one block of x at a time."""
        if _suits_rows(dim, x, scale, v):
            return fused.softmax_product(x, scale, v, bounded=bounded)[0]
        cuts = blocks(dim, limit, x, scale, v)
        if len(cuts) == 1:
            return weighted_product(probabilities(x, dim, bounded), scale, v, dim)
        y = v.new_empty(broadcast_shape(x.shape, scale.shape, v.shape))
        for cut in cuts:
            part = [block_of(each, cut, x.dim()) for each in (x, scale, v, y)]
            weighted_product(probabilities(part[0], dim, bounded), part[1], part[2], dim, out=part[3])
        return y

    @staticmethod
    def backward(ctx: Any, u: Tensor | None) -> Any:
        """Return the product with u for v, and with the inner part of the third derivative for x."""
        if u is None:
            return (None,) * 6
        x, scale, v = ctx.saved_tensors
        dim, bounded, limit = ctx.rest
        needs = ctx.needs_input_grad
        by_x = by_scale = by_v = None
        if needs[0] or needs[1]:
            p = Softmax.call(bound(x) if bounded else x, dim)
        if needs[0]:
            inner = third_derivative(p, u, v, dim)
            by_x = LogSumExpProduct.call(x, scale, inner, dim, bounded, limit).sum_to_size(x.shape)
        if needs[1]:
            by_scale = (u * p * (v - (p * v).sum(dim, keepdim=True))).sum_to_size(scale.shape)
        if needs[2]:
            by_v = LogSumExpProduct.call(x, scale, u, dim, bounded, limit).sum_to_size(v.shape)
        return by_x, by_scale, by_v, None, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, scale_t: Tensor | None, v_t: Tensor | None, *_: None) -> Tensor:
        """Apply the product rule; the third derivative is symmetric, so the terms of x and v share one product."""
        x, scale, v = ctx.saved_tensors
        dim, bounded, limit = ctx.rest
        inner = v_t
        if x_t is not None:
            by_x = third_derivative(Softmax.call(bound(x) if bounded else x, dim), x_t, v, dim)
            inner = by_x if v_t is None else by_x + v_t
        terms = []
        if inner is not None:
            terms.append(LogSumExpProduct.call(x, scale, inner, dim, bounded, limit))
        if scale_t is not None:
            terms.append(LogSumExpProduct.call(x, scale_t, v, dim, bounded, limit))
        return (terms[0] if len(terms) == 1 else terms[0] + terms[1]).expand(ctx.shape)


def _suits_rows(dim: int, x: Tensor, scale: Tensor, v: Tensor) -> bool:
    return dim == -1 and x.shape == v.shape and scale.shape == (*x.shape[:-1], 1) and fused.takes(x, scale, v)


def bound(x: Tensor) -> Tensor:
    """Replace infinities by the largest finite numbers, so that their softmax is the limit, not NaN."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def probabilities(x: Tensor, dim: int, bounded: bool) -> Tensor:
    """Compute the softmax by torch's kernel, for `forward` of Functions; `bounded` treats infinities as limits."""
    return torch.softmax(bound(x) if bounded else x, dim)
