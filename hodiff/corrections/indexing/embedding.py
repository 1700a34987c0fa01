"""Rules for embeddings and bags of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.wrapped_tensors import is_batched

# How torch.embedding_bag numbers them.
_MODES = ("sum", "mean", "max")
_REASON = "no forward rule, and no second derivative with weights of samples or of the maximum"
_REFERENCE = "sums and maxima of rows are linear in them"


def _real(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2


def _covers(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2,
    scale_grad_by_freq: Any = False,
    mode: Any = "mean",
    sparse: Any = False,
    per_sample_weights: Any = None,
    include_last_offset: Any = False,
    padding_idx: Any = None,
) -> bool:
    # Renormed weights change in place, scaled gradients are no derivatives, and sparse ones are torch's alone.
    del norm_type, include_last_offset
    return (
        _real(weight)
        and (padding_idx is None or -weight.shape[0] <= padding_idx < weight.shape[0])
        and isinstance(input, Tensor)
        and not input.is_nested
        and not input.is_floating_point()
        and max_norm is None
        and not scale_grad_by_freq
        and not sparse
        and mode in _MODES
        and (input.dim(), offsets is None) in ((1, False), (2, True))
        and (per_sample_weights is None or (mode == "sum" and per_sample_weights.shape == input.shape))
    )


@register(F.embedding_bag, kind="missing", routes=ROUTES, reason=_REASON, reference=_REFERENCE, covers=_covers)
def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    del max_norm, norm_type, scale_grad_by_freq, sparse
    if offsets is None:
        bags, length = input.shape
        places = torch.arange(bags, device=input.device).repeat_interleave(length)
    else:
        if not _divide(offsets, input.shape[0], include_last_offset):
            return NotImplemented
        bags = offsets.shape[0] - bool(include_last_offset)
        # Of equal offsets the last one counts: the bags before are empty.
        every = torch.arange(input.shape[0], device=input.device)
        places = torch.bucketize(every, offsets.to(torch.long), right=True) - 1
    weights = None if per_sample_weights is None else per_sample_weights.flatten()
    return _bagged(weight, input.flatten(), places, bags, mode, weights, padding_idx)


def _numbered_covers(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: Any = False,
    mode: Any = 0,
    sparse: Any = False,
    per_sample_weights: Any = None,
    include_last_offset: Any = False,
    padding_idx: Any = None,
) -> bool:
    del include_last_offset
    return mode in (0, 1, 2) and _covers(
        indices,
        weight,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=_MODES[mode],
        sparse=sparse,
        per_sample_weights=per_sample_weights,
        padding_idx=padding_idx,
    )


@register(
    torch.embedding_bag, kind="missing", routes=ROUTES, reason=_REASON, reference=_REFERENCE, covers=_numbered_covers
)
def _numbered_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    output = _embedding_bag(
        indices,
        weight,
        offsets,
        mode=_MODES[mode],
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    if output is NotImplemented:
        return NotImplemented
    constants = (weight.detach(), indices, offsets, scale_grad_by_freq, mode, sparse)
    weights = None if per_sample_weights is None else per_sample_weights.detach()
    return output, *torch.embedding_bag(*constants, weights, include_last_offset, padding_idx)[1:]


def _divide(offsets: Tensor, end: int, include_last: bool) -> bool:
    """Whether offsets go from 0 to the end, where asking is cheap; what torch makes of others depends on the mode."""
    if offsets.dim() != 1 or not offsets.shape[0]:
        return False
    if torch.compiler.is_compiling() or offsets.device.type != "cpu" or is_batched(offsets):
        return True
    first, last = int(offsets[0]), int(offsets[-1])
    return first == 0 and (last == end if include_last else last <= end)


def _bagged(
    weight: Tensor,
    indices: Tensor,
    places: Tensor,
    bags: int,
    mode: str,
    per_sample_weights: Tensor | None,
    padding_idx: int | None,
) -> Tensor:
    """Reduce the rows `indices` of the weight, each into the bag in its place."""
    counted = places < bags
    if padding_idx is not None:
        counted = counted & (indices != padding_idx % weight.shape[0])
    places = places.clamp(max=max(bags - 1, 0))
    rows = weight.index_select(0, indices)
    if mode == "max":
        return _maximum(rows, places, counted, bags)
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()  # as torch's kernel sums them
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    rows = torch.where(counted.unsqueeze(-1), rows, 0)
    total = rows.new_zeros(bags, rows.shape[1]).index_add(0, places, rows)
    if mode == "sum":
        return total.to(weight.dtype)
    sizes = torch.zeros(bags, dtype=torch.long, device=rows.device).index_add(0, places, counted.long())
    return (total / sizes.clamp(min=1).unsqueeze(-1)).to(weight.dtype)


def _maximum(rows: Tensor, places: Tensor, counted: Tensor, bags: int) -> Tensor:
    """The first largest element of each bag, gathered; 0 of an empty bag."""
    fixed = torch.where(counted.unsqueeze(-1), rows.detach(), -math.inf)
    spread = places.unsqueeze(-1).expand(fixed.shape)
    top = fixed.new_full((bags, fixed.shape[1]), -math.inf).scatter_reduce(0, spread, fixed, "amax")
    is_top = counted.unsqueeze(-1) & ((fixed == top.index_select(0, places)) | (fixed != fixed))
    count = rows.shape[0]
    every = torch.arange(count, device=rows.device).unsqueeze(-1)
    first = torch.full_like(top, count, dtype=torch.long)
    first = first.scatter_reduce(0, spread, torch.where(is_top, every, count), "amin")
    if not count:
        return rows.new_zeros(top.shape)
    return torch.where(first < count, rows.gather(0, first.clamp(max=count - 1)), 0)


def _pads(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2,
    scale_grad_by_freq: Any = False,
    sparse: Any = False,
) -> bool:
    del norm_type
    return (
        padding_idx is not None
        and _real(weight)
        and isinstance(input, Tensor)
        and -weight.shape[0] <= padding_idx < weight.shape[0]
        and max_norm is None
        and not scale_grad_by_freq
        and not sparse
    )


@register(
    F.embedding,
    routes=ROUTES,
    reason="the padding row has no gradient, yet a tangent, so that routes disagree where padding is used",
    reference="the padding row is a constant",
    covers=_pads,
)
def _embedding(input: Tensor, weight: Tensor, padding_idx: int, *_: Any, **__: Any) -> Tensor:
    rows = F.embedding(input, weight)
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), rows.detach(), rows)
