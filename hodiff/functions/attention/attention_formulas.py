r"""Attention of a block of query rows, and its derivatives.

$O = P V$ with $P = \operatorname{softmax}(s Q K^\top + M)$. With tangents dotted,
$\delta(t)$ the row sums of $P \circ t$, and $G$ the cotangent of $O$:

$$ \dot S = s (\dot Q K^\top + Q \dot K^\top) + \dot M, \quad \dot P = P \circ (\dot S - \delta(\dot S)), \quad
   \bar P = G V^\top, \quad \bar S = P \circ (\bar P - \delta(\bar P)), $$

$\dot O = \dot P V + P \dot V$; $(\bar Q, \bar K, \bar V, \bar M) = (s \bar S K, s \bar S^\top Q, P^\top G, \bar S)$;
and the tangent of this gradient by the product rule. Dropout multiplies $P$ by a constant in products with $V$ or $G$.
A soft-cap c replaces the scores X before the mask by $c\,t$ with $t = \tanh(X / c)$. Tangents and cotangents of X get
the factor $1 - t^2$, and the tangent of the cotangent gains $-\tfrac{2}{c} t \circ \dot S \circ \bar S$.
Each formula recomputes complete rows of $P$, so that no running maximum is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.functions.attention.dropout import kept
from hodiff.kernels import fused
from hodiff.kernels.attention.options import Options
from hodiff.torch_internals.operators import softmax_gradient
from hodiff.torch_internals.tensors import broadcast_shape


class _Seen(NamedTuple):
    """The keys that some row of the block sees."""

    first: int
    size: int
    keys: int

    def cut(self, t: Tensor, dim: int) -> Tensor:
        """Narrow a dimension of a tensor to the seen keys."""
        # A slice of everything is an alias, which `torch.autograd.grad(..., is_grads_batched=True)` cannot batch.
        return t if self.size == self.keys else t.narrow(dim, self.first, self.size)

    def columns(self, mask: Tensor) -> Tensor:
        """Narrow the columns of a mask to the seen keys, unless one column is for all keys."""
        return self.cut(mask, -1) if mask.shape[-1] == self.keys else mask

    @property
    def around(self) -> tuple[int, int]:
        """Numbers of unseen keys before and after the seen keys."""
        return self.first, self.keys - self.first - self.size


class _Block(NamedTuple):
    """Intermediates that all formulas share: wide inputs, cut to the seen keys, and the weights."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    keep: Tensor | None
    seen: _Seen
    # The soft-cap's t and its slope 1 - t².
    bent: Tensor | None
    slope: Tensor | None


def value(options: Options, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any) -> tuple[Tensor]:
    """Compute $O$."""
    block = _open(options, start, q, k, v, mask, seed)
    return (_thinned(block.p, block) @ block.v,)


def tangent(
    options: Options, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any, *tangents: Tensor | None
) -> tuple[Tensor]:
    r"""Compute $\dot O$ for tangents of q, k, v and the mask; None is zero."""
    block = _open(options, start, q, k, v, mask, seed)
    q_t, k_t, v_t, mask_t = _cut(block, *tangents)
    s_t = _plus(_score_tangent(options, block, q_t, k_t), mask_t)
    return (_output_tangent(block, None if s_t is None else _softmax_derivative(block.p, s_t), v_t),)


def gradient(
    options: Options,
    wanted: tuple[bool, ...],
    start: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    seed: Any,
    cotangent: Tensor,
) -> tuple[Tensor, ...]:
    r"""Compute the wanted gradients among $\bar Q, \bar K, \bar V, \bar M$."""
    block = _open(options, start, q, k, v, mask, seed)
    g = _wide(cotangent)
    by_q = by_k = by_v = by_mask = None
    if wanted[2]:
        by_v = _thinned(block.p, block).mT @ g
    if wanted[0] or wanted[1] or wanted[3]:
        p_bar = _thinned(g @ block.v.mT, block)
        s_bar = _softmax_derivative(block.p, p_bar)
        by_mask = s_bar if wanted[3] else None
        x_bar = _sloped(block, s_bar)
        by_q = options.scale * (x_bar @ block.k) if wanted[0] else None
        by_k = options.scale * (x_bar.mT @ block.q) if wanted[1] else None
    return _close(block, (q, k, v, mask), by_q, by_k, by_v, by_mask)


def gradient_tangent(
    options: Options,
    wanted: tuple[bool, ...],
    with_output: bool,
    start: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    seed: Any,
    cotangent: Tensor,
    *tangents: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute the tangents of `gradient` and, last, of the output if wanted; a tangent of None is zero."""
    block = _open(options, start, q, k, v, mask, seed)
    q_t, k_t, v_t, mask_t = _cut(block, *tangents[:4])
    g, g_t = _wide(cotangent), None if tangents[4] is None else _wide(tangents[4])
    capped_t = _score_tangent(options, block, q_t, k_t)
    s_t = _plus(capped_t, mask_t)
    p_t = by_q = by_k = by_v = by_mask = None
    if wanted[0] or wanted[1] or wanted[3]:
        p_bar = _thinned(g @ block.v.mT, block)
        p_bar_t = _sum_of_products(g_t, block.v, g, v_t)
        p_bar_t = None if p_bar_t is None else _thinned(p_bar_t, block)
        p_t, s_bar, s_bar_t = _softmax_curvature(block.p, s_t, p_bar, p_bar_t)
        x_bar, x_bar_t = _sloped(block, s_bar), _sloped(block, s_bar_t)
        if options.softcap is not None and block.bent is not None and capped_t is not None:
            x_bar_t = _plus(x_bar_t, (-2 / options.softcap) * block.bent * capped_t * s_bar)
        if wanted[0]:
            by_q = _plus(
                None if x_bar_t is None else options.scale * (x_bar_t @ block.k),
                None if k_t is None else options.scale * (x_bar @ k_t),
            )
        if wanted[1]:
            by_k = _plus(
                None if x_bar_t is None else options.scale * (x_bar_t.mT @ block.q),
                None if q_t is None else options.scale * (x_bar.mT @ q_t),
            )
        by_mask = s_bar_t if wanted[3] else None
    elif s_t is not None:
        p_t = _softmax_derivative(block.p, s_t)
    if wanted[2]:
        by_v = _plus(
            None if p_t is None else _thinned(p_t, block).mT @ g,
            None if g_t is None else _thinned(block.p, block).mT @ g_t,
        )
    found = [by_q, by_k, by_v, by_mask]
    like = [block.q, block.k, block.v, block.p]
    found = [
        torch.zeros_like(zero) if each is None and want else each
        for each, zero, want in zip(found, like, wanted, strict=True)
    ]
    closed = _close(block, (q, k, v, mask), *found)
    return (*closed, _output_tangent(block, p_t, v_t)) if with_output else closed


def _output_tangent(block: _Block, p_t: Tensor | None, v_t: Tensor | None) -> Tensor:
    r"""Compute $\dot P V + P \dot V$, where one tangent may be None for zero, but not both."""
    through_weights = None if p_t is None else _thinned(p_t, block) @ block.v
    total = _plus(through_weights, None if v_t is None else _thinned(block.p, block) @ v_t)
    assert total is not None
    return total


def _open(options: Options, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any) -> _Block:
    rows, keys = q.shape[-2], k.shape[-2]
    seen = _Seen(*options.keys_seen(start, rows, keys), keys)
    q, k, v = _wide(q), seen.cut(_wide(k), -2), seen.cut(_wide(v), -2)
    scores = options.scale * q @ k.mT
    bent = slope = None
    if options.softcap is not None:
        bent = torch.tanh(scores / options.softcap)
        scores, slope = options.softcap * bent, 1 - bent * bent
    if mask is not None:
        mask = seen.columns(mask)
        scores = scores + _wide(mask) if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    if options.has_band:
        distance = torch.arange(seen.first, seen.first + seen.size, device=q.device)
        distance = distance - torch.arange(start, start + rows, device=q.device)[:, None]
        for bound, hidden in ((options.high, torch.gt), (options.low, torch.lt)):
            if bound is not None:
                scores = scores.masked_fill(hidden(distance, bound), -torch.inf)
    p = torch.softmax(scores, -1) if mask is None and options.every_row_sees(start, rows, keys) else _softmax(scores)
    keep = None
    if options.dropout_p:
        keep = kept(seed, options.batch, (start, seen.first), (rows, seen.size), options.dropout_p, p.dtype)
    return _Block(q, k, v, p, keep, seen, bent, slope)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; a row of only -inf gives zeros, and has zero derivatives."""
    hidden = scores.detach().amax(-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)


def _softmax_derivative(p: Tensor, t: Tensor) -> Tensor:
    r"""Compute $P \circ (t - \delta(t))$ for a tangent of the scores or, by symmetry, a cotangent of the weights."""
    if p.shape != t.shape:
        shape = broadcast_shape(p.shape, t.shape)
        p, t = p.expand(shape), t.expand(shape)
    return softmax_gradient(t, p, -1, p.dtype)


def _softmax_curvature(p: Tensor, s_t: Any, p_bar: Tensor, p_bar_t: Any) -> tuple[Any, Tensor, Any]:
    r"""Compute $\dot P$, $\bar S$ and $\dot{\bar S}$ from $P$, $\dot S$, $\bar P$ and $\dot{\bar P}$; None is zero."""
    if s_t is None:
        s_bar = _softmax_derivative(p, p_bar)
        return None, s_bar, None if p_bar_t is None else _softmax_derivative(p, p_bar_t)
    inputs = p, s_t, p_bar, p_bar_t
    if p_bar_t is not None and fused.suit(*inputs) and fused.takes(*inputs):
        return fused.softmax_curvature(*inputs)
    centred_s, centred_bar = (each - (p * each).sum(-1, keepdim=True) for each in (s_t, p_bar))
    w = _plus(centred_s * centred_bar, p_bar_t)
    return p * centred_s, p * centred_bar, _softmax_derivative(p, w)


def _score_tangent(options: Options, block: _Block, q_t: Any, k_t: Any) -> Tensor | None:
    """Compute the tangent of the scores after the soft-cap and before the mask."""
    scaled_q, scaled_t = (None if each is None else options.scale * each for each in (block.q, q_t))
    return _sloped(block, _sum_of_products(scaled_t, block.k, scaled_q, k_t))


def _sloped(block: _Block, t: Any) -> Any:
    return t if t is None or block.slope is None else block.slope * t


def _sum_of_products(a: Any, b: Any, c: Any, d: Any) -> Tensor | None:
    r"""Compute $A B^\top + C D^\top$ in one product; a or d, or both, may be None for zero."""
    if a is None or d is None:
        return c @ d.mT if a is None and d is not None else None if a is None else a @ b.mT
    return torch.cat((a, c), -1) @ torch.cat((b, d), -1).mT


def _thinned(p: Tensor, block: _Block) -> Tensor:
    return p if block.keep is None else p * block.keep


def _cut(block: _Block, q_t: Any, k_t: Any, v_t: Any, mask_t: Any) -> tuple[Any, ...]:
    """Widen tangents and cut them like their primals."""
    return (
        None if q_t is None else _wide(q_t),
        None if k_t is None else block.seen.cut(_wide(k_t), -2),
        None if v_t is None else block.seen.cut(_wide(v_t), -2),
        None if mask_t is None else block.seen.columns(_wide(mask_t)),
    )


def _close(block: _Block, inputs: tuple[Any, ...], *found: Tensor | None) -> tuple[Tensor, ...]:
    """Undo the cut with zeros, and sum over broadcast dimensions."""
    q, k, v, mask = inputs
    around = block.seen.around
    by_q, by_k, by_v, by_mask = found
    if any(around):
        by_k, by_v = (None if each is None else torch.nn.functional.pad(each, (0, 0, *around)) for each in (by_k, by_v))
        if by_mask is not None and mask.shape[-1] == block.seen.keys:
            by_mask = torch.nn.functional.pad(by_mask, around)
    pairs = zip((by_q, by_k, by_v, by_mask), (q, k, v, mask), strict=True)
    return tuple(each.sum_to_size(like.shape) for each, like in pairs if each is not None)


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in {torch.float16, torch.bfloat16} else t


def _plus(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b
