"""Rules for attention and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


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
