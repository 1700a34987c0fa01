r"""The Functions of the softmax $p = e^{x} / \sum e^{x}$ and its logarithm, along one dimension.

The Jacobian of the softmax is $J = \operatorname{diag}(p) - p p^\top$, a polynomial in its output. So `Softmax` saves
only the output, and all further derivatives are derivatives of the polynomial `SoftmaxProduct`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.kernels import fused
from hodiff.rules.blockwise import allows_in_place
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction


class Softmax(SavingFunction):
    """The Function behind `softmax`; the dimension is negative. Saves its output."""

    reads_inputs = False
    reads_output = True
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        """Compute $p$."""
        return fused.softmax(x, None, bounded=False) if dim == -1 and fused.takes(x) else torch.softmax(x, dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None]:
        r"""Compute $J \bar p$; the Jacobian is symmetric."""
        if cotangent is None or not ctx.needs_input_grad[0]:
            return None, None
        return SoftmaxProduct.call(ctx.saved_tensors[0], cotangent, *ctx.rest), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        r"""Compute $J \dot x$."""
        return SoftmaxProduct.call(Softmax.call(ctx.saved_tensors[0], *ctx.rest), tangent, *ctx.rest)


class SoftmaxProduct(SavingFunction):
    r"""$p \circ v - p\,\langle p, v \rangle$ with broadcasting, for probabilities p. Saves both inputs."""

    saves = 2
    broadcasts = True

    @staticmethod
    def forward(p: Tensor, v: Tensor, dim: int) -> Tensor:
        """Compute the product."""
        if dim == -1 and p.shape == v.shape and fused.takes(p, v):
            return fused.weighted(p, v)
        return weighted_product(p, None, v, dim)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        """Return $u v - ⟨p,v⟩ u - ⟨p,u⟩ v$ for p, and the product with u for v."""
        if u is None:
            return None, None, None
        p, v = ctx.saved_tensors
        (dim,) = ctx.rest
        by_p = by_v = None
        if all(ctx.needs_input_grad[:2]) and dim == -1 and p.shape == v.shape == u.shape and fused.takes(p, v, u):
            return *fused.weighted_pullback(p, v, u), None
        if ctx.needs_input_grad[0]:
            by_p = third_derivative(p, u, v, dim).sum_to_size(p.shape)
        if ctx.needs_input_grad[1]:
            by_v = SoftmaxProduct.call(p, u, dim).sum_to_size(v.shape)
        return by_p, by_v, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, p_t: Tensor | None, v_t: Tensor | None, _: None) -> Tensor:
        """Apply the product rule."""
        p, v = ctx.saved_tensors
        (dim,) = ctx.rest
        terms = []
        if p_t is not None:
            inner = (p * v).sum(dim, keepdim=True)
            terms.append(p_t * (v - inner) - p * (p_t * v).sum(dim, keepdim=True))
        if v_t is not None:
            terms.append(SoftmaxProduct.call(p, v_t, dim))
        return (terms[0] if len(terms) == 1 else terms[0] + terms[1]).expand(ctx.shape)


class LogSoftmax(SavingFunction):
    """The Function behind `log_softmax`; the dimension is negative. Saves its input."""

    broadcasts = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        """Compute $log p$."""
        return torch.log_softmax(x, dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None]:
        """Compute the cotangent minus $p$ times its sum."""
        if cotangent is None or not ctx.needs_input_grad[0]:
            return None, None
        (dim,) = ctx.rest
        p = Softmax.call(ctx.saved_tensors[0], dim)
        return cotangent - p * cotangent.sum(dim, keepdim=True), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Compute the tangent minus its mean under $p$."""
        (dim,) = ctx.rest
        p = Softmax.call(ctx.saved_tensors[0], dim)
        return tangent - (p * tangent).sum(dim, keepdim=True)


def weighted_product(p: Tensor, scale: Tensor | None, v: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    r"""Compute $s\,(p \circ v - p\,\langle p, v \rangle)$ in three passes, not differentiably, for `forward`."""
    p = _laid_out_like(p, v)
    weights = p if scale is None else p * scale
    if out is None and not allows_in_place(p, scale, v):
        y = weights * v
        return y - p * y.sum(dim, keepdim=True)
    y = torch.mul(weights, v, out=out)
    return y.addcmul_(p, y.sum(dim, keepdim=True), value=-1)


def _laid_out_like(p: Tensor, v: Tensor) -> Tensor:
    """Give a small tensor the memory order of a batch of large tensors, which speeds up kernels over both."""
    samples_inside = v.dim() == p.dim() + 1 == 3 and v.stride(-2) == 1 < v.stride(-1)
    return p.mT.contiguous().mT if samples_inside and p.device.type == "cpu" else p


def third_derivative(p: Tensor, u: Tensor, v: Tensor, dim: int) -> Tensor:
    """Compute $u v - ⟨p,v⟩ u - ⟨p,u⟩ v$: log-sum-exp's third derivative along u and v, before the Jacobian of p."""
    pu = (p * u).sum(dim, keepdim=True)
    pv = (p * v).sum(dim, keepdim=True)
    return u * (v - pv) - pu * v
