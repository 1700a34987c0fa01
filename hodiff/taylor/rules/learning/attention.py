"""Rules for attention, dropout and embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.fallback import unknown
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


@rule("nn.embedding", "embedding", analytic=True)
def embedding(frame: Frame, func: Any, *args: Any, padding_idx: Any = None, max_norm: Any = None, **_: Any) -> Any:
    """Rows of the weight; the padding row is constant."""
    # torch.embedding takes the weight first.
    first_is_weight = value_of(frame, args[0]).is_floating_point()
    weight, indices = (args[0], args[1]) if first_is_weight else (args[1], args[0])
    if not first_is_weight:
        padding_idx = args[2] if len(args) > 2 else padding_idx
        max_norm = args[3] if len(args) > 3 else max_norm
    elif len(args) > 2:
        padding_idx = args[2] if args[2] >= 0 else None
    if max_norm is not None:
        return unknown(frame, func, args, {"padding_idx": padding_idx, "max_norm": max_norm, **_})
    rows = torch.index_select(weight, 0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[-1])
    if padding_idx is None:
        return rows
    padding_idx %= weight.shape[0]
    return torch.where((indices == padding_idx).unsqueeze(-1), value_of(frame, rows), rows)


@rule("scaled_dot_product_attention", "nn.scaled_dot_product_attention")
def attention(
    frame: Frame,
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q k / √d + mask) v."""
    if enable_gqa:
        repeats = value_of(frame, query).shape[-3] // value_of(frame, key).shape[-3]
        key = torch.repeat_interleave(key, repeats, -3)
        value = torch.repeat_interleave(value, repeats, -3)
    width = value_of(frame, query).shape[-1]
    scores = torch.matmul(query * (1 / math.sqrt(width) if scale is None else scale), key.transpose(-2, -1))
    if is_causal:
        rows, columns = value_of(frame, scores).shape[-2:]
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=value_of(frame, query).device).tril()
    if attn_mask is not None:
        boolean = value_of(frame, attn_mask).dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:
        # Rows that are masked entirely are 0.
        blind = (value_of(frame, scores) == -math.inf).all(-1, keepdim=True)
        weights = weights.masked_fill(blind, 0.0)
    return torch.matmul(functional.dropout(weights, dropout_p), value)


@rule("dropout", "nn.dropout", "nn.dropout1d", "nn.dropout2d", "nn.dropout3d")
def dropout(frame: Frame, func: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Multiply by a random factor, which all coefficients share."""
    if not training or p == 0:
        return x
    return x * func(torch.ones_like(value_of(frame, x)), p, training)
