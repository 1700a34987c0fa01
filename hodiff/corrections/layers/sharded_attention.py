"""Attention of DTensors by hodiff's operators instead of torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.subclasses import for_subclasses
from hodiff.functions.attention.attention import attend
from hodiff.functions.attention.options import Band
from hodiff.functions.attention.sharded import is_distributed
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated


@for_subclasses(F.scaled_dot_product_attention)
def _sharded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    given = (query, key, value, attn_mask)
    if not any(map(is_distributed, given)) or not may_be_differentiated(given):
        return NotImplemented
    if is_causal and attn_mask is not None:
        return NotImplemented
    return attend(query, key, value, attn_mask, scale, Band(is_causal), dropout_p, None, enable_gqa)
