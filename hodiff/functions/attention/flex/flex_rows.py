r"""A block of query rows of attention under functions of scores and positions.

If a function only adds to the scores, `attention` computes the block, with the added term as a mask. Other functions
are evaluated here, by operators that have derivatives of every order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.functions.attention.attention import attention
from hodiff.functions.attention.flex.block_masks import Seen
from hodiff.functions.attention.flex.positions import Dependence, Indices, Modification, everywhere
from hodiff.rules.autocast import without_autocast


class How(NamedTuple):
    """Settings that all blocks share.

    Attributes:
        batch: Size of the batch.
        heads: Number of heads of the queries.
        scale: Factor of the scores.
        adds: Indices on which the term added to the scores depends, or None if the function does more than add.
        hides: Indices on which each of the two masks depends.
        statistics: Whether log-sum-exps and greatest scores are wanted, too.
    """

    batch: int
    heads: int
    scale: float
    adds: Dependence | None
    hides: tuple[Dependence, Dependence]
    statistics: bool


def attend_rows(
    score_mod: Modification | None,
    mask_mods: tuple[Modification | None, Modification | None],
    how: How,
    start: int,
    keys: Seen,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, ...]:
    """Compute the output of a block and, if wanted, log-sum-exps and greatest scores of its rows."""
    # q is (B, H, rows, E), k (B, H', S, E) and v (B, H', S, F). The first mask is for blocks, the second for all.
    columns = keys.positions(q.device)
    if keys.columns is None:
        k, v = (each.narrow(-2, keys.first, keys.total) for each in (k, v))
    else:
        k, v = (each.index_select(-2, columns) for each in (k, v))
    rows = torch.arange(start, start + q.shape[-2], device=q.device)
    batch, heads = (torch.arange(size, device=q.device) for size in (how.batch, how.heads))
    indices = (batch, heads, rows, columns)
    # Compute scores in float32 at least, also under autocast.
    with without_autocast(q.device.type):
        seen = _seen(mask_mods, how, start, indices, keys)
        if how.statistics or (score_mod is not None and how.adds is None):
            return _by_operators(score_mod, how, indices, seen, q, k, v)
        mask = seen
        if score_mod is not None and how.adds is not None:
            dtype = torch.promote_types(q.dtype, torch.float32)
            zero = torch.zeros((), dtype=dtype, device=q.device)
            mask = everywhere(score_mod, indices, how.adds, zero).to(dtype)
            mask = mask if seen is None else mask.masked_fill(~seen, -math.inf)
        return (attention(q, k, v, mask, how.scale, enable_gqa=k.shape[-3] != how.heads),)


def _seen(mask_mods: Any, how: How, start: int, indices: Indices, keys: Seen) -> Tensor | None:
    """Return a mask of the keys that are seen, which broadcasts with the weights; None for all."""
    in_blocks, outside = (
        None if each is None else everywhere(each, indices, varies)
        for each, varies in zip(mask_mods, how.hides, strict=True)
    )
    rows = indices[2].shape[0]
    masked, whole = (keys.in_full(each, start, rows) for each in (keys.masked, keys.whole))
    seen = _both(in_blocks, masked)
    seen = seen if seen is None or whole is None else seen | whole
    return _both(seen, outside)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a & b


def _by_operators(
    score_mod: Any, how: How, indices: Indices, seen: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    shared = k.shape[-3]
    # Use reshape: dynamo cannot trace unflatten inside of a mode.
    groups = (*q.shape[:-3], shared, how.heads // shared)
    grouped = q.to(dtype).reshape(*groups, *q.shape[-2:])
    k, wide_v = (each.to(dtype).unsqueeze(-3) for each in (k, v))
    scores = (how.scale * grouped @ k.mT).flatten(-4, -3)
    hidden = None if seen is None else ~seen
    if score_mod is not None:
        # At a hidden key, the function may have no finite derivative. Call it at 0 there, which has no gradient to q.
        scores = scores if hidden is None else scores.masked_fill(hidden, 0.0)
        scores = everywhere(score_mod, indices, (True,) * 4, scores=scores.expand(how.batch, -1, -1, -1)).to(dtype)
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    greatest = scores.detach().amax(-1, keepdim=True)
    blind = greatest == -math.inf
    finite = scores.masked_fill(blind, 0.0)
    weights = torch.softmax(finite, -1).masked_fill(blind, 0.0)
    output = weights.reshape(*groups, *weights.shape[-2:]) @ wide_v
    # Copy the output: views that a Function returns cannot be changed in place.
    output = output.flatten(-4, -3).to(q.dtype, copy=True)
    if not how.statistics:
        return (output,)
    shift = greatest.masked_fill(blind, 0.0)
    sums = (finite - shift).exp().sum(-1, keepdim=True)
    exponent = (shift + sums.log()).masked_fill(blind, -math.inf)
    return output, exponent.squeeze(-1).clone(), greatest.squeeze(-1).clone()
