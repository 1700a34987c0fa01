"""Rules for scaled dot-product attention, also of nested and sharded tensors, and for its softmax."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.subclasses import for_subclasses
from hodiff.distributed.layouts import any_distributed
from hodiff.errors import RouteError
from hodiff.functions.attention.attention import attend, attention
from hodiff.functions.attention.attention_arguments import Band, require_options
from hodiff.functions.attention.packed import packed_attention
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.operators import safe_softmax


class _Jagged(Function):
    """Conversion of packed values to a nested tensor; torch's own view has no second derivative."""

    @staticmethod
    def forward(values: Tensor, offsets: Tensor) -> Tensor:
        """Return a nested tensor with its own memory, because torch's rule would apply to a view."""
        return torch.nested.nested_tensor_from_jagged(values.clone(), offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the values of the cotangent, which torch differentiates."""
        return cotangent.values(), None


@for_subclasses(F.scaled_dot_product_attention)
def _attention_of_subclasses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of sharded tensors, or of jagged ones, (B, H, j, E) by `transpose(1, 2)` of jagged (B, j, H, E)."""
    given = (query, key, value)
    if any_distributed((*given, attn_mask)):
        if not may_be_differentiated((*given, attn_mask)) or (is_causal and attn_mask is not None):
            return NotImplemented
        require_options(scale, dropout_p)
        return attend(query, key, value, attn_mask, scale, Band(is_causal), dropout_p, None, enable_gqa)
    if attn_mask is not None or dropout_p or not may_be_differentiated(given):
        return NotImplemented
    if not all(isinstance(each, Tensor) and each.layout is torch.jagged and each.dim() == 4 for each in given):
        return NotImplemented
    upright = [each.transpose(1, 2) for each in given]
    if not all(each.is_contiguous() for each in upright):
        return NotImplemented
    q, k, v = (each.values().transpose(0, 1) for each in upright)
    offsets, key_offsets = (each.offsets() for each in upright[:2])  # type: ignore[attr-defined]  # of jagged tensors alone, which mypy does not know
    y = packed_attention(
        q, k, v, offsets.diff(), key_offsets.diff(), scale=scale, is_causal=is_causal, enable_gqa=enable_gqa
    )
    return _Jagged.apply(y.transpose(0, 1), offsets).transpose(1, 2)


def strided_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, is_causal: bool, **options: Any
) -> Tensor | Declined:
    """Attention of strided nested tensors (B, H, *, E)."""
    given = (query, key, value)
    if mask is not None or dropout_p or not all(each.is_nested for each in given):
        return unable("a nested tensor has a mask, dropout or a dense one beside it")
    pieces = zip(*(each.unbind() for each in given), strict=True)
    attend = partial(attention, is_causal=is_causal, **options)
    return torch.nested.as_nested_tensor([attend(*each) for each in pieces])


@register(
    F.scaled_dot_product_attention,
    kind="missing",
    routes=ROUTES,
    reason="the gradients of the fused kernels have no derivative",
    reference="Vaswani et al. (2017), eq. 1; Rabe & Staats (2021)",
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
    if not all(each.is_floating_point() for each in (query, key, value)):
        return INVALID
    if not query.device == key.device == value.device or not isinstance(is_causal, bool):
        return INVALID
    if query.is_nested or key.is_nested or value.is_nested:
        return strided_attention(
            query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # On a CPU torch has no fused kernel with dropout: it composes operators that have all derivatives, except for rows
    # that a mask hides.
    if dropout_p and query.is_cpu and attn_mask is None:
        return UNNEEDED
    # On a GPU with dropout the rule always runs: it draws other weights than torch's kernels, the same for a seed.
    if not dropout_p and not may_be_differentiated((query, key, value, attn_mask)):
        return UNNEEDED
    if attn_mask is not None:
        if is_causal:
            return unable("a mask is given beside is_causal, which only some kernels take")
        if attn_mask.device != query.device:
            # Torch itself may return uninitialized memory.
            raise RouteError(
                f"torch.nn.functional.scaled_dot_product_attention: attn_mask: expected a tensor on {query.device} as "
                f"query is, got one on {attn_mask.device}; Tensor.to moves it."
            )
        if attn_mask.dim() < 2:
            attn_mask = attn_mask[(None,) * (2 - attn_mask.dim())]
        # hodiff's attention accepts more masks than torch's.
        if attn_mask.dtype not in {torch.bool, torch.float32, query.dtype} or not _fits(attn_mask, query, key):
            return INVALID
    if dropout_p and query.is_cpu:
        return _dropped(query, key, value, attn_mask, float(dropout_p), scale, enable_gqa)
    if enable_gqa and min(query.dim(), key.dim(), value.dim()) > 2 and key.shape[-3] != value.shape[-3]:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        enable_gqa = False
    require_options(scale, dropout_p)
    return attend(query, key, value, attn_mask, scale, Band(is_causal), float(dropout_p), None, enable_gqa)


def _dropped(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Compute attention with dropout as torch composes it, with the same random draw."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // max(each.shape[-3], 1), -3) for each in (key, value))
    root = abs(scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scores = (query * math.copysign(root, 1.0 if scale is None else scale)) @ (key.mT * root)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    weights = _safe_softmax(scores + mask, -1)
    return torch.dropout(weights, dropout_p, True) @ value


@register(
    safe_softmax,
    routes=FORWARD_INSIDE,
    reason="the derivatives of a row that is all $-\\infty$, whose value is 0, are NaN",
    reference="the row is a constant",
)
def _safe_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    hidden = (x.detach() == -math.inf).all(dim, keepdim=True)
    return torch.softmax(x.masked_fill(hidden, 0.0), dim).masked_fill(hidden, 0.0)


def _fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether the mask broadcasts to the batch dimensions of the scores."""
    batch = query.shape[:-2] if query.dim() >= key.dim() else key.shape[:-2]
    extra = mask.dim() - 2
    return extra <= len(batch) and all(
        size in {1, query.shape[d], key.shape[d]} if min(query.dim(), key.dim()) >= -d else size in {1, batch[d + 2]}
        for d, size in ((i - mask.dim(), size) for i, size in enumerate(mask.shape[:-2]))
    )
