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

from hodiff.functions.losses.linear_terms import logit_rows
from hodiff.functions.losses.linear_terms.logit_rows import Options as Options
from hodiff.functions.losses.linear_terms.logit_rows import Rows
from hodiff.kernels.products_in_float32 import factor, is_rounded, product
from hodiff.kernels.products_in_float32 import wide as wide


class _Block(NamedTuple):
    """Intermediates that all formulas share: factors, logits, and slope and curvature of a soft-cap."""

    x: Tensor
    w: Tensor
    rows: Rows
    slope: Tensor | None
    bend: Tensor | None


def value(
    options: Options, first: int | None, x: Tensor, w: Tensor, bias: Any, u: Any, target: Tensor, lse: None = None
) -> tuple[Tensor]:
    """Compute the terms; the log-sum-exp is taken over the given classes."""
    del lse
    block = _open(options, first, x, w, bias, target)
    return (logit_rows.value(block.rows, u),)


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
    return (logit_rows.tangent(block.rows, lse, z_t, u),)


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
    s_bar = _times(block.slope, logit_rows.cotangent(block.rows, lse, u, wide(cotangent)))
    return _close(options, wanted, first, target, _products(wanted, first, block.x, block.w, s_bar))


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
            lse_t = (logit_rows.probabilities(block.rows, lse) * z_t).sum(-1, keepdim=True)
            mean_t = g[..., :1] * lse_t
    # Compute these terms before a kernel overwrites the tangent of the logits.
    terms_t = (logit_rows.terms(block.rows, lse_t, z_t, u),) if with_terms else ()
    needs_z_bar = x_t is not None or (w_t is not None and through_w_t) or block.bend is not None
    z_bar, z_bar_t = logit_rows.curvature(block.rows, lse, u, (g, g_t), z_t, mean_t, needs_z_bar)
    s_bar_t = _times(block.slope, z_bar_t)
    if needs_z_bar:
        s_bar = _times(block.slope, z_bar)
        if block.bend is not None and s_t is not None:
            s_bar_t = s_bar_t + block.bend * z_bar * s_t
    by_x, by_w, by_bias = _products(wanted, first, block.x, block.w, s_bar_t)
    if by_x is not None and w_t is not None and through_w_t:
        by_x = _plus_product(first, by_x, s_bar, _factor(first, w_t))
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
    p = logit_rows.overwritten_by_probabilities(block.rows, lse)
    return tuple(_product(first, p, _factor(first, each)) for each in (w_t, bias_t) if each is not None)


def only_counted(options: Options, target: Tensor, t: Tensor) -> Tensor:
    """Set ignored samples to zero: their infinities must not spread to other samples."""
    return torch.where(target != options.ignore, t, 0)


def _open(options: Options, first: int | None, x: Tensor, w: Tensor, bias: Any, target: Tensor) -> _Block:
    x, w = _features(options, first, target, x), _factor(first, w)
    z = _product(first, x, w.mT)
    if bias is not None:
        z = z + wide(bias).mT if first is None else z.add_(wide(bias).mT)
    capped = options.softcap is not None
    dtype = w.dtype if not capped and first is not None and is_rounded(w) else z.dtype
    if options.softcap is None:
        return _Block(x, w, Rows(options, target, first, z, dtype), None, None)
    t = torch.tanh(z / options.softcap)
    slope = 1 - t * t
    rows = Rows(options, target, first, options.softcap * t, dtype)
    return _Block(x, w, rows, slope, (-2 / options.softcap) * t * slope)


def _score_tangent(
    options: Options, first: int | None, block: _Block, target: Tensor, x_t: Any, w_t: Any, bias_t: Any
) -> Tensor:
    total = None if x_t is None else _product(first, _features(options, first, target, x_t), block.w.mT)
    if w_t is not None:
        w_t = _factor(first, w_t).mT
        total = _product(first, block.x, w_t) if total is None else _plus_product(first, total, block.x, w_t)
    if bias_t is not None:
        bias_t = wide(bias_t).mT
        total = bias_t if total is None else total + bias_t
    assert total is not None
    return total.expand(block.rows.z.shape)


def _plus_product(first: int | None, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a product to a total; in place for a tile, whose total nothing else uses."""
    if first is None:
        return total + a @ b
    return total.addmm_(a, b) if total.dtype is a.dtype is b.dtype else total.add_(product(a, b))


def _product(first: int | None, a: Tensor, b: Tensor) -> Tensor:
    """Multiply, for a tile by units for 16 bits where there are some; the formulas for all classes may have batches."""
    return a @ b if first is None else product(a, b)


def _factor(first: int | None, t: Tensor) -> Tensor:
    return wide(t) if first is None else factor(t)


def _products(wanted: tuple[bool, ...], first: int | None, x: Tensor, w: Tensor, s_bar: Tensor) -> tuple[Any, ...]:
    by_bias = s_bar.sum(-2, dtype=wide(s_bar[:0]).dtype).unsqueeze(-1) if wanted[2] else None
    if first is not None and is_rounded(w):
        s_bar = s_bar.to(w.dtype)  # once for both products
    return (
        _product(first, s_bar, w) if wanted[0] else None,
        _product(first, s_bar.mT, x) if wanted[1] else None,
        by_bias,
    )


def _close(
    options: Options, wanted: tuple[bool, ...], first: int | None, target: Tensor, found: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    by_x, by_w, by_bias = found
    by_x = by_x if by_x is None or first is not None else only_counted(options, target, by_x)
    return tuple(each for each, want in zip((by_x, by_w, by_bias), wanted, strict=True) if want)


def _features(options: Options, first: int | None, target: Tensor, x: Tensor) -> Tensor:
    """Widen x and, without tiles, set ignored samples to zero; tiles get x with these zeros."""
    return factor(x) if first is not None else only_counted(options, target, wide(x))


def _times(slope: Tensor | None, t: Tensor) -> Tensor:
    return t if slope is None else slope * t
