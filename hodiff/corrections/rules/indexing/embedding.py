"""Rules for embeddings and embedding bags."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched

# Modes in the order of torch.embedding_bag's numbers.
_MODES = ("sum", "mean", "max")
_REASON = "no forward rule; no second derivative with per_sample_weights or in mode='max'"
_REFERENCE = "sums and maxima of the selected rows, which are linear"
_SCALED = unable("gradients that scale_grad_by_freq scales are no derivatives, with which forward mode would agree")


def _declined(weight: Tensor, max_norm: Any, scale_grad_by_freq: Any, sparse: Any, padding_idx: Any) -> Declined | None:
    """Return the reason to decline options that no rule for rows of a weight supports, or None."""
    if not weight.is_floating_point() or weight.dim() != 2:
        return INVALID
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return INVALID
    if max_norm is not None:
        return unable("max_norm changes the weight in place")
    if scale_grad_by_freq:
        return _SCALED
    return unable("a sparse gradient is torch's alone") if sparse else None


@register(F.embedding_bag, kind="missing", routes=ROUTES, reason=_REASON, reference=_REFERENCE)
def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    del norm_type
    declined = _declined(weight, max_norm, scale_grad_by_freq, sparse, padding_idx)
    if declined is not None:
        return declined
    if input.is_nested:
        return unable("the input is nested")
    if input.is_floating_point() or mode not in _MODES or (input.dim(), offsets is None) not in ((1, False), (2, True)):
        return INVALID
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        return INVALID
    if per_sample_weights is not None and per_sample_weights.dtype != weight.dtype:
        return INVALID
    if offsets is None:
        bags, length = input.shape
        if not length:
            return INVALID
        places = torch.arange(bags, device=input.device).repeat_interleave(length)
    else:
        if not _divide(offsets, input.shape[0], include_last_offset):
            return INVALID
        bags = offsets.shape[0] - bool(include_last_offset)
        # For equal offsets the last one counts: the earlier bags are empty.
        every = torch.arange(input.shape[0], device=input.device)
        places = torch.bucketize(every, offsets.to(torch.long), right=True) - 1
    weights = None if per_sample_weights is None else per_sample_weights.flatten()
    return _bagged(weight, input.flatten(), places, bags, mode, weights, padding_idx)


@register(torch.embedding_bag, kind="missing", routes=ROUTES, reason=_REASON, reference=_REFERENCE)
def _embedding_bag_by_number(
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
    if not 0 <= mode < len(_MODES):
        return INVALID
    output = _embedding_bag(
        indices,
        weight,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=_MODES[mode],
        sparse=sparse,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    if isinstance(output, Declined):
        return output
    constants = (weight.detach(), indices, offsets, scale_grad_by_freq, mode, sparse)
    weights = None if per_sample_weights is None else per_sample_weights.detach()
    return output, *torch.embedding_bag(*constants, weights, include_last_offset, padding_idx)[1:]


def _divide(offsets: Tensor, end: int, include_last: bool) -> bool:
    """Whether offsets rise from 0 to the end, checked on a CPU only; torch's result for others depends on the mode."""
    if offsets.dim() != 1 or not offsets.shape[0]:
        return False
    if torch.compiler.is_compiling() or offsets.device.type != "cpu" or is_batched(offsets):
        return True
    first, last = int(offsets[0]), int(offsets[-1])
    return first == 0 and (last == end if include_last else last <= end) and not bool((offsets.diff() < 0).any())


def _bagged(
    weight: Tensor,
    indices: Tensor,
    places: Tensor,
    bags: int,
    mode: str,
    per_sample_weights: Tensor | None,
    padding_idx: int | None,
) -> Tensor:
    """Reduce the rows `indices` of the weight, each into its bag in `places`."""
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
    """First largest element of each bag, gathered; 0 for an empty bag."""
    fixed = torch.where(counted.unsqueeze(-1), rows.detach(), -math.inf)
    spread = places.unsqueeze(-1).expand(fixed.shape)
    top = fixed.new_full((bags, fixed.shape[1]), -math.inf).scatter_reduce(0, spread, fixed, "amax")
    is_top = counted.unsqueeze(-1) & ((fixed == top.index_select(0, places)) | (fixed != fixed))
    count = rows.shape[0]
    every = torch.arange(count, device=rows.device).unsqueeze(-1)
    first = torch.full_like(top, count, dtype=torch.long)
    first = first.scatter_reduce(0, spread, torch.where(is_top, every, count), "amin")
    if not count:
        return rows.new_zeros(top.shape) + rows.sum()  # a zero that depends on the weight, as torch's result does
    return torch.where(first < count, rows.gather(0, first.clamp(max=count - 1)), 0)


_padded = partial(
    register,
    routes=ROUTES,
    reason="the padding row has a tangent but no gradient, so routes disagree if padding is used",
    reference="the padding row is a constant",
)


@_padded(F.embedding)
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if scale_grad_by_freq and in_forward_mode():
        return _SCALED
    if padding_idx is None:
        return UNNEEDED
    if weight.dim() != 2 or not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return INVALID
    rows = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), rows.detach(), rows)


@_padded(torch.embedding)
def _embedding_by_number(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if scale_grad_by_freq and in_forward_mode():
        return _SCALED
    if padding_idx < 0:
        return UNNEEDED
    rows = torch.embedding(weight, indices, -1, scale_grad_by_freq, sparse)
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
