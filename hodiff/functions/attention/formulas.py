r"""Attention of a block of query rows, and its derivatives.

$O = P V$ with $P = \operatorname{softmax}(s Q K^\top + M)$. With tangents dotted,
$\delta(t)$ the row sums of $P \circ t$, and $G$ the cotangent of $O$:

$$ \dot S = s (\dot Q K^\top + Q \dot K^\top) + \dot M, \quad \dot P = P \circ (\dot S - \delta(\dot S)), \quad
   \bar P = G V^\top, \quad \bar S = P \circ (\bar P - \delta(\bar P)), $$

$\dot O = \dot P V + P \dot V$; $(\bar Q, \bar K, \bar V, \bar M) = (s \bar S K, s \bar S^\top Q, P^\top G, \bar S)$;
and the tangent of this gradient by the product rule. Dropout multiplies $P$ by a constant where it meets $V$ or $G$.
Each formula recomputes $P$: a row of it is complete, so that no running maximum is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.functions.attention.dropout import kept
from hodiff.kernels import fused
from hodiff.torch_internals.operators import softmax_gradient


class Options(NamedTuple):
    """The numbers of an attention."""

    scale: float
    is_causal: bool
    dropout_p: float
    # Of the weights: it numbers them for dropout.
    batch: tuple[int, ...]


class _Block(NamedTuple):
    """What all formulas share: wide inputs, keys cut to those that a row of the block sees, and the weights."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    keep: Tensor | None
    visible: int
    keys: int


def value(options: Options, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any) -> tuple[Tensor]:
    """$O$."""
    block = _open(options, start, q, k, v, mask, seed)
    return (_thinned(block.p, block) @ block.v,)


def tangent(
    options: Options, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any, *tangents: Tensor | None
) -> tuple[Tensor]:
    r"""$\dot O$ of tangents of q, k, v and the mask, where None is zero."""
    block = _open(options, start, q, k, v, mask, seed)
    q_t, k_t, v_t, mask_t = _cut(block, *tangents)
    s_t = _score_tangent(options, block, q_t, k_t, mask_t)
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
    r"""Those wanted of $\bar Q, \bar K, \bar V, \bar M$."""
    block = _open(options, start, q, k, v, mask, seed)
    g = _wide(cotangent)
    by_q = by_k = by_v = by_mask = None
    if wanted[2]:
        by_v = _thinned(block.p, block).mT @ g
    if wanted[0] or wanted[1] or wanted[3]:
        p_bar = _thinned(g @ block.v.mT, block)
        s_bar = _softmax_derivative(block.p, p_bar)
        by_q = options.scale * (s_bar @ block.k) if wanted[0] else None
        by_k = options.scale * (s_bar.mT @ block.q) if wanted[1] else None
        by_mask = s_bar if wanted[3] else None
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
    """The tangents of `gradient` and, last, of the output if wanted, where a tangent that is None is zero."""
    block = _open(options, start, q, k, v, mask, seed)
    q_t, k_t, v_t, mask_t = _cut(block, *tangents[:4])
    g, g_t = _wide(cotangent), None if tangents[4] is None else _wide(tangents[4])
    s_t = _score_tangent(options, block, q_t, k_t, mask_t)
    p_t = by_q = by_k = by_v = by_mask = None
    if wanted[0] or wanted[1] or wanted[3]:
        p_bar = _thinned(g @ block.v.mT, block)
        p_bar_t = _sum_of_products(g_t, block.v, g, v_t)
        p_bar_t = None if p_bar_t is None else _thinned(p_bar_t, block)
        p_t, s_bar, s_bar_t = _softmax_curvature(block.p, s_t, p_bar, p_bar_t)
        if wanted[0]:
            by_q = _plus(
                None if s_bar_t is None else options.scale * (s_bar_t @ block.k),
                None if k_t is None else options.scale * (s_bar @ k_t),
            )
        if wanted[1]:
            by_k = _plus(
                None if s_bar_t is None else options.scale * (s_bar_t.mT @ block.q),
                None if q_t is None else options.scale * (s_bar.mT @ q_t),
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
    r"""$\dot P V + P \dot V$, where one of them may be zero but not both."""
    through_weights = None if p_t is None else _thinned(p_t, block) @ block.v
    total = _plus(through_weights, None if v_t is None else _thinned(block.p, block) @ v_t)
    assert total is not None
    return total


def _open(options: Options, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any) -> _Block:
    rows, keys = q.shape[-2], k.shape[-2]
    visible = min(keys, start + rows) if options.is_causal else keys
    q, k, v = _wide(q), _first(_wide(k), -2, visible), _first(_wide(v), -2, visible)
    scores = options.scale * q @ k.mT
    if mask is not None:
        mask = _columns(mask, visible, keys)
        scores = scores + _wide(mask) if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    if options.is_causal:
        last = torch.arange(start, start + rows, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(visible, device=q.device) > last, -torch.inf)
    p = torch.softmax(scores, -1) if mask is None else _softmax(scores)
    keep = (
        None if options.dropout_p == 0 else kept(seed, options.batch, start, p.shape[-2:], options.dropout_p, p.dtype)
    )
    return _Block(q, k, v, p, keep, visible, keys)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; a row of -inf alone gives zeros, and has zero derivatives."""
    hidden = scores.detach().amax(-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)


def _softmax_derivative(p: Tensor, t: Tensor) -> Tensor:
    r"""$P \circ (t - \delta(t))$ for the tangent of the scores or, as it is symmetric, the cotangent of the weights."""
    if p.shape != t.shape:
        shape = torch.broadcast_shapes(p.shape, t.shape)
        p, t = p.expand(shape), t.expand(shape)
    return softmax_gradient(t, p, -1, p.dtype)


def _softmax_curvature(p: Tensor, s_t: Any, p_bar: Tensor, p_bar_t: Any) -> tuple[Any, Tensor, Any]:
    r"""$\dot P$, $\bar S$, and the latter's tangent: the same of $\dot{\bar P}$ plus the product of those centred."""
    if s_t is None:
        s_bar = _softmax_derivative(p, p_bar)
        return None, s_bar, None if p_bar_t is None else _softmax_derivative(p, p_bar_t)
    inputs = p, s_t, p_bar, p_bar_t
    if p_bar_t is not None and fused.suit(*inputs) and fused.takes(*inputs):
        return fused.softmax_curvature(*inputs)
    centred_s, centred_bar = (each - (p * each).sum(-1, keepdim=True) for each in (s_t, p_bar))
    w = _plus(centred_s * centred_bar, p_bar_t)
    return p * centred_s, p * centred_bar, _softmax_derivative(p, w)


def _score_tangent(options: Options, block: _Block, q_t: Any, k_t: Any, mask_t: Any) -> Tensor | None:
    scaled_q, scaled_t = (None if each is None else options.scale * each for each in (block.q, q_t))
    return _plus(_sum_of_products(scaled_t, block.k, scaled_q, k_t), mask_t)


def _sum_of_products(a: Any, b: Any, c: Any, d: Any) -> Tensor | None:
    r"""$A B^\top + C D^\top$ in one product, where one of a and d may be zero, or both."""
    if a is None or d is None:
        return c @ d.mT if a is None and d is not None else None if a is None else a @ b.mT
    return torch.cat((a, c), -1) @ torch.cat((b, d), -1).mT


def _thinned(p: Tensor, block: _Block) -> Tensor:
    return p if block.keep is None else p * block.keep


def _cut(block: _Block, q_t: Any, k_t: Any, v_t: Any, mask_t: Any) -> tuple[Any, ...]:
    """Tangents, wide and cut like what they belong to."""
    return (
        None if q_t is None else _wide(q_t),
        None if k_t is None else _first(_wide(k_t), -2, block.visible),
        None if v_t is None else _first(_wide(v_t), -2, block.visible),
        None if mask_t is None else _columns(_wide(mask_t), block.visible, block.keys),
    )


def _close(block: _Block, inputs: tuple[Any, ...], *found: Tensor | None) -> tuple[Tensor, ...]:
    """Undo the cut with zeros, and sum over what was broadcast."""
    q, k, v, mask = inputs
    hidden = block.keys - block.visible
    by_q, by_k, by_v, by_mask = found
    if hidden:
        by_k = None if by_k is None else torch.nn.functional.pad(by_k, (0, 0, 0, hidden))
        by_v = None if by_v is None else torch.nn.functional.pad(by_v, (0, 0, 0, hidden))
        if by_mask is not None and mask.shape[-1] == block.keys:
            by_mask = torch.nn.functional.pad(by_mask, (0, hidden))
    pairs = zip((by_q, by_k, by_v, by_mask), (q, k, v, mask), strict=True)
    return tuple(each.sum_to_size(like.shape) for each, like in pairs if each is not None)


def _columns(mask: Tensor, visible: int, keys: int) -> Tensor:
    return _first(mask, -1, visible) if mask.shape[-1] == keys else mask


def _first(t: Tensor, dim: int, size: int) -> Tensor:
    # A slice of everything is an alias, which `torch.autograd.grad(..., is_grads_batched=True)` cannot batch.
    return t if t.shape[dim] == size else t.narrow(dim, 0, size)


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in {torch.float16, torch.bfloat16} else t


def _plus(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b
