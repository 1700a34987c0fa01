"""Rule for scaled dot-product attention, whose fused kernels have no second derivative."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections import composites as _composites  # noqa: F401  (enters nn.MultiheadAttention's function)
from hodiff.corrections.registry import register
from hodiff.functions.attention.attention import attend
from hodiff.routes import ROUTES
from hodiff.torch_internals.differentiation import may_be_differentiated


def _covered(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> bool:
    """What torch takes, too: hodiff's attention takes more, and such calls keep torch's errors."""
    tensors = (query, key, value)
    if not all(isinstance(each, Tensor) and each.is_floating_point() and not each.is_nested for each in tensors):
        return False
    if attn_mask is None:
        return True
    return isinstance(attn_mask, Tensor) and attn_mask.dtype in {torch.bool, torch.float32, query.dtype}


@register(
    F.scaled_dot_product_attention,
    name="torch.nn.functional.scaled_dot_product_attention",
    kind="missing",
    routes=ROUTES,
    reason="the gradients of the fused kernels have no derivative",
    reference="Vaswani et al. (2017), eq. 1; Rabe & Staats (2021)",
    covers=_covered,
)
def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    # With dropout the rule draws other weights than torch's kernels, and always the same for a seed.
    if not dropout_p and not may_be_differentiated((query, key, value, attn_mask)):
        return NotImplemented
    if attn_mask is not None:
        if is_causal:
            return NotImplemented  # an error but for some kernels
        if attn_mask.dim() == 1:
            attn_mask = attn_mask[None]
        if not _fits(attn_mask, query, key):
            return NotImplemented
    if enable_gqa and min(query.dim(), key.dim(), value.dim()) > 2 and key.shape[-3] != value.shape[-3]:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        enable_gqa = False
    return attend(query, key, value, attn_mask, scale, is_causal, float(dropout_p), None, enable_gqa)


def _fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether the mask has no batch dimensions that the scores do not have."""
    batch = query.shape[:-2] if query.dim() >= key.dim() else key.shape[:-2]
    extra = mask.dim() - 2
    return extra <= len(batch) and all(
        size in {1, query.shape[d], key.shape[d]} if min(query.dim(), key.dim()) >= -d else size in {1, batch[d + 2]}
        for d, size in ((i - mask.dim(), size) for i, size in enumerate(mask.shape[:-2]))
    )
