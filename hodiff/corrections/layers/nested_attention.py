"""Attention of nested tensors, sequence by sequence, from their packed values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hodiff.corrections.declining import Declined, unable
from hodiff.corrections.subclasses import for_subclasses
from hodiff.functions.attention.attention import attention
from hodiff.functions.attention.packed import packed_attention
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated


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
def _jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of jagged tensors (B, H, j, E), which are `transpose(1, 2)` of jagged tensors (B, j, H, E)."""
    given = (query, key, value)
    if attn_mask is not None or dropout_p or not may_be_differentiated(given):
        return NotImplemented
    if not all(isinstance(each, Tensor) and each.layout is torch.jagged and each.dim() == 4 for each in given):
        return NotImplemented
    upright = [each.transpose(1, 2) for each in given]
    if not all(each.is_contiguous() for each in upright):
        return NotImplemented
    q, k, v = (each.values().transpose(0, 1) for each in upright)
    offsets, key_offsets = (each.offsets() for each in upright[:2])  # type: ignore[attr-defined]  # jagged ones alone
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
