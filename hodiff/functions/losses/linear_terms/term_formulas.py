r"""The terms of a cross-entropy of linear logits, of some samples and classes, and their derivatives.

With $S = X W^\top + b$, $Z = \varphi(S)$, $\varphi(s) = c \tanh(s / c)$ or $s$, and $P = e^{Z - L}$, the terms of
sample n are $L_n = \log \sum_k e^{Z_{nk}}$, $Z_{n t_n}$ and, where labels are smoothed, $\sum_k u_k Z_{nk}$. With
tangents dotted, and cotangents $\gamma$, $\tau$, $\rho$ of the three terms, one number per sample each,

$$ \dot S = \dot X W^\top + X \dot W^\top + \dot b, \quad \dot Z = \varphi'(S) \circ \dot S, \quad
   \dot L = \langle P, \dot Z \rangle, \quad
   \bar Z = \gamma P + \tau e_t + \rho u, \quad \bar S = \varphi'(S) \circ \bar Z, $$

$(\bar X, \bar W, \bar b) = (\bar S W, \bar S^\top X, \bar S^\top 1)$, and its tangent follows by the product rule, with
$\dot P = P \circ (\dot Z - \dot L)$. Once $L$ and $\dot L$ are known, all results are sums over classes. A formula may
then take some classes, from number `first` on, and its results for samples are summed. Otherwise `first` is None, and
the formula takes all classes.

Samples, or classes, are dimension -2 of every tensor: x (..., N, E), weight (..., V, E), bias (..., V, 1), the class
weights u likewise, target and L (..., N, 1), cotangents (..., N, 2 or 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.kernels import fused
from hodiff.kernels.cross_entropy import cpu as logits


class Options(NamedTuple):
    """Options of a loss on which its terms depend."""

    ignore: int
    softcap: float | None
    smoothed: bool


class _Block(NamedTuple):
    """Intermediates that all formulas share: wide inputs, logits, and slope and curvature of a soft-cap."""

    x: Tensor
    w: Tensor
    z: Tensor
    slope: Tensor | None
    bend: Tensor | None
    # Index of the target among the given classes, and whether it is one of them.
    place: Tensor
    here: Tensor


def value(
    options: Options, first: int | None, x: Tensor, w: Tensor, bias: Any, u: Any, target: Tensor, lse: None = None
) -> tuple[Tensor]:
    """Compute the terms; the log-sum-exp is taken over the given classes."""
    del lse
    block = _open(options, first, x, w, bias, target)
    by_kernel = first is not None and fused.takes(block.z)
    total = fused.logsumexp(block.z) if by_kernel else block.z.logsumexp(-1, keepdim=True)
    return (_terms(options, block, total, block.z, u),)


def tangent(
    options: Options,
    first: int | None,
    x: Tensor,
    w: Tensor,
    bias: Any,
    u: Any,
    target: Tensor,
    lse: Any,
    x_t: Any,
    w_t: Any,
    bias_t: Any,
) -> tuple[Tensor]:
    """Compute the tangent of the terms; a tangent of None is zero, and not all are None."""
    block = _open(options, first, x, w, bias, target)
    z_t = _times(block.slope, _score_tangent(options, first, block, target, x_t, w_t, bias_t))
    return (_terms(options, block, (_probabilities(block, lse) * z_t).sum(-1, keepdim=True), z_t, u),)


def gradient(
    options: Options,
    wanted: tuple[bool, ...],
    first: int | None,
    x: Tensor,
    w: Tensor,
    bias: Any,
    u: Any,
    target: Tensor,
    lse: Any,
    cotangent: Tensor,
) -> tuple[Tensor, ...]:
    r"""Compute the wanted gradients among $\bar X, \bar W, \bar b$."""
    block = _open(options, first, x, w, bias, target)
    s_bar = _times(block.slope, _logit_cotangent(options, first, block, lse, u, wide(cotangent)))
    return _close(options, wanted, first, target, _products(wanted, block.x, block.w, s_bar))


def gradient_tangent(
    options: Options,
    wanted: tuple[bool, ...],
    with_terms: bool,
    through_w_t: bool,
    first: int | None,
    x: Tensor,
    w: Tensor,
    bias: Any,
    u: Any,
    target: Tensor,
    lse: Any,
    cotangent: Tensor,
    x_t: Any,
    w_t: Any,
    bias_t: Any,
    cotangent_t: Any,
    by_x: Any = None,
    mean_t: Any = None,
) -> tuple[Tensor, ...]:
    """Compute the tangents of `gradient` and, last, of the terms if wanted; None is zero, and not all are None."""
    # A tile does not determine the tangent of the log-sum-exp, so the caller passes it in `mean_t`. The caller may also
    # know the product of the logits' cotangent with the weight's tangent.
    del by_x
    block = _open(options, first, x, w, bias, target)
    g, g_t = wide(cotangent), None if cotangent_t is None else wide(cotangent_t)
    lse_t: Any = None
    s_t: Any = None
    z_t: Any = None
    s_bar: Any = None
    if x_t is not None or w_t is not None or bias_t is not None:
        s_t = _score_tangent(options, first, block, target, x_t, w_t, bias_t)
        z_t = _times(block.slope, s_t)
        if mean_t is None:
            lse_t = (_probabilities(block, lse) * z_t).sum(-1, keepdim=True)
            mean_t = g[..., :1] * lse_t
    # Compute these terms before a kernel overwrites the tangent of the logits.
    terms_t = (_terms(options, block, lse_t, z_t, u),) if with_terms else ()
    needs_z_bar = x_t is not None or (w_t is not None and through_w_t) or block.bend is not None
    z_bar, z_bar_t = _logit_curvature(options, first, block, lse, u, (g, g_t), z_t, mean_t, needs_z_bar)
    s_bar_t = _times(block.slope, z_bar_t)
    if needs_z_bar:
        s_bar = _times(block.slope, z_bar)
        if block.bend is not None and s_t is not None:
            s_bar_t = s_bar_t + block.bend * z_bar * s_t
    by_x, by_w, by_bias = _products(wanted, block.x, block.w, s_bar_t)
    if by_x is not None and w_t is not None and through_w_t:
        by_x = _plus_product(first, by_x, s_bar, wide(w_t))
    if by_w is not None and x_t is not None:
        by_w = _plus_product(first, by_w, s_bar.mT, _features(options, first, target, x_t))
    return (*_close(options, wanted, first, target, (by_x, by_w, by_bias)), *terms_t)


def means(
    options: Options,
    first: int | None,
    x: Tensor,
    w: Tensor,
    bias: Any,
    u: Any,
    target: Tensor,
    lse: Tensor,
    w_t: Any,
    bias_t: Any,
) -> tuple[Tensor, ...]:
    r"""Compute $P \dot W$ and $P \dot b$ for the given tangents, without a soft-cap."""
    del u
    block = _open(options, first, x, w, bias, target)
    p = _probabilities(block, lse, first)
    return tuple(p @ wide(each) for each in (w_t, bias_t) if each is not None)


def only_counted(options: Options, target: Tensor, t: Tensor) -> Tensor:
    """Set ignored samples to zero: their infinities must not spread to other samples."""
    return torch.where(target != options.ignore, t, 0)


def _open(options: Options, first: int | None, x: Tensor, w: Tensor, bias: Any, target: Tensor) -> _Block:
    x, w = _features(options, first, target, x), wide(w)
    z = x @ w.mT
    z = z if bias is None else z + wide(bias).mT
    counted = target != options.ignore
    if first is None:
        place, here = torch.where(counted, target, 0), counted
    else:
        place = target - first
        here = counted & (place >= 0) & (place < w.shape[-2])
        place = torch.where(here, place, 0)
    if options.softcap is None:
        return _Block(x, w, z, None, None, place, here)
    t = torch.tanh(z / options.softcap)
    slope = 1 - t * t
    return _Block(x, w, options.softcap * t, slope, (-2 / options.softcap) * t * slope, place, here)


def _probabilities(block: _Block, lse: Tensor | None, first: int | None = None) -> Tensor:
    """Compute $P$; a kernel overwrites the logits of a tile, whose first class is given."""
    if lse is not None and _by_kernel(first, block.z):
        return logits.cotangent_(block.z, wide(lse), torch.ones_like(lse), None, None, block.place)
    return torch.softmax(block.z, -1) if lse is None else torch.exp(block.z - wide(lse))


def _by_kernel(first: int | None, *tiles: Tensor) -> bool:
    """Whether a kernel supports tiles of logits, which nothing else uses."""
    return first is not None and logits.takes(*tiles)


def _logit_cotangent(options: Options, first: int | None, block: _Block, lse: Any, u: Any, g: Tensor) -> Tensor:
    r"""Compute $\bar Z$; a kernel overwrites the logits with it."""
    if lse is None or (options.smoothed and u is not None) or not _by_kernel(first, block.z):
        return _spread(options, block, _probabilities(block, lse) * g[..., :1], u, g)
    rest = g[..., 2:] if options.smoothed else None
    return logits.cotangent_(block.z, wide(lse), g[..., :1], g[..., 1:2], rest, _place(block))


def _logit_curvature(
    options: Options,
    first: int | None,
    block: _Block,
    lse: Any,
    u: Any,
    cotangents: tuple[Tensor, Tensor | None],
    z_t: Any,
    mean_t: Any,
    needs_z_bar: bool,
) -> tuple[Any, Tensor]:
    r"""Compute $\bar Z$, if needed, and its tangent; a kernel overwrites the logits and their tangent."""
    g, g_t = cotangents
    if z_t is not None and g_t is not None:
        mean_t = mean_t - g_t[..., :1]
    if z_t is None or lse is None or (options.smoothed and u is not None) or not _by_kernel(first, block.z, z_t):
        p = _probabilities(block, lse)
        z_bar_t = p * (g_t[..., :1] if z_t is None and g_t is not None else g[..., :1] * z_t - mean_t)
        z_bar_t = z_bar_t if g_t is None else _spread(options, block, z_bar_t, u, g_t)
        return _spread(options, block, p * g[..., :1], u, g) if needs_z_bar else None, z_bar_t
    at_target = g[..., 1:2], None if g_t is None else g_t[..., 1:2]
    everywhere = (g[..., 2:], None if g_t is None else g_t[..., 2:]) if options.smoothed else (None, None)
    return logits.curvature_(block.z, z_t, wide(lse), g[..., :1], mean_t, at_target, everywhere, _place(block))


def _place(block: _Block) -> Tensor:
    """Index of the target, or -1 if it is not among the given classes."""
    return torch.where(block.here, block.place, -1)


def _terms(options: Options, block: _Block, lse: Tensor, z: Tensor, u: Any) -> Tensor:
    """Concatenate the terms of each sample, from logits or from their tangents."""
    hit = torch.where(block.here, z.gather(-1, block.place), 0)
    if not options.smoothed:
        return torch.cat((lse, hit), -1)
    return torch.cat((lse, hit, z.sum(-1, keepdim=True) if u is None else z @ wide(u)), -1)


def _spread(options: Options, block: _Block, z_bar: Tensor, u: Any, g: Tensor) -> Tensor:
    r"""Add target and smoothing to the first part of $\bar Z$, $\gamma P$, or to its tangent."""
    z_bar = z_bar.scatter_add(-1, block.place, torch.where(block.here, g[..., 1:2], 0))
    if not options.smoothed:
        return z_bar
    return z_bar + (g[..., 2:] if u is None else g[..., 2:] * wide(u).mT)


def _score_tangent(
    options: Options, first: int | None, block: _Block, target: Tensor, x_t: Any, w_t: Any, bias_t: Any
) -> Tensor:
    total = None if x_t is None else _features(options, first, target, x_t) @ block.w.mT
    if w_t is not None:
        w_t = wide(w_t).mT
        total = block.x @ w_t if total is None else _plus_product(first, total, block.x, w_t)
    if bias_t is not None:
        bias_t = wide(bias_t).mT
        total = bias_t if total is None else total + bias_t
    assert total is not None
    return total.expand(block.z.shape)


def _plus_product(first: int | None, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a product to a total; in place for a tile, whose total nothing else uses."""
    return total + a @ b if first is None else total.addmm_(a, b)


def _products(wanted: tuple[bool, ...], x: Tensor, w: Tensor, s_bar: Tensor) -> tuple[Any, ...]:
    return (
        s_bar @ w if wanted[0] else None,
        s_bar.mT @ x if wanted[1] else None,
        s_bar.sum(-2).unsqueeze(-1) if wanted[2] else None,
    )


def _close(
    options: Options, wanted: tuple[bool, ...], first: int | None, target: Tensor, found: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    by_x, by_w, by_bias = found
    by_x = by_x if by_x is None or first is not None else only_counted(options, target, by_x)
    return tuple(each for each, want in zip((by_x, by_w, by_bias), wanted, strict=True) if want)


def _features(options: Options, first: int | None, target: Tensor, x: Tensor) -> Tensor:
    """Widen x and, without tiles, set ignored samples to zero; tiles get x with these zeros."""
    return wide(x) if first is not None else only_counted(options, target, wide(x))


def _times(slope: Tensor | None, t: Tensor) -> Tensor:
    return t if slope is None else slope * t


def wide(t: Tensor) -> Tensor:
    """Convert 16-bit numbers to float32."""
    return t.float() if t.dtype in {torch.float16, torch.bfloat16} else t
