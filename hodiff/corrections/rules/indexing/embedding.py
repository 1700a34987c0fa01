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
from hodiff.errors import RouteError
from hodiff.routes import ROUTES
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.torch_internals.autograd.differentiation import carry_derivatives, may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import any_holds, is_batched
from hodiff.torch_internals.compilers.dynamo import hide_from_dynamo
from hodiff.torch_internals.tensors import has_numbers

# Modes in the order of torch.embedding_bag's numbers.
_MODES = ("sum", "mean", "max")
_REASON = "no forward rule; no second derivative with per_sample_weights or in mode='max'"
_REFERENCE = "sums and maxima of the selected rows, which are linear"
# Units of rounding by which the norm of a row that torch rescaled may exceed max_norm.
_ROUNDING = 8


class _Refused(AnyOrderFunction):
    """A weight of which no derivative is right; derivatives by other tensors do not ask for it."""

    @staticmethod
    def forward(weight: Tensor, message: str) -> Tensor:
        """Return the weight."""
        del message
        return weight.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the message."""
        del output
        ctx.refusal = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Raise."""
        del cotangent
        raise RouteError(ctx.refusal)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise."""
        del tangents
        raise RouteError(ctx.refusal)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], weight: Tensor, message: str) -> tuple[Tensor, int | None]:
        """Keep the batch where it is."""
        del info
        return _Refused.call(weight, message), in_dims[0]


def _without_options(
    name: str, weight: Tensor, input: Tensor, scaled: Any, max_norm: Any, norm_type: float = 2.0
) -> Tensor | None:
    """Return a differentiated weight with which a call without these options has the same value; None for others."""
    if not (scaled or max_norm is not None) or weight.dim() != 2 or not carry_derivatives((weight,)):
        return None
    if max_norm is not None:
        norms = weight.detach().norm(norm_type, dim=1, keepdim=True)
        if _exceed(norms, input, max_norm):
            if torch.compiler.is_compiling():  # traced, the formula alone would be differentiated
                _refuse(name, max_norm)
            scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1)
            return _Refused.call(weight * scale, _rescaled(name, max_norm))
    if not scaled:
        return weight
    return _Refused.call(
        weight,
        f"{name}: expected scale_grad_by_freq=False for a derivative by the weight, got {scaled}, which divides "
        "gradients by counts of rows so that they are no derivatives; set scale_grad_by_freq=False, detach the weight, "
        "or use torch's gradients by correct=False or outside of corrected().",
    )


def _rescaled(name: str, max_norm: float) -> str:
    return (
        f"{name}: expected rows of the weight with norms of at most max_norm={max_norm} for a derivative by the "
        "weight, got a row that torch rescales in place, outside of the graph; rescale the weight before, as one call "
        "under torch.no_grad() does, or set max_norm=None."
    )


def _refuse(name: str, max_norm: float) -> None:
    """Raise; dynamo, which does not know the numbers, runs the caller uncompiled instead."""
    raise RouteError(_rescaled(name, max_norm))


hide_from_dynamo(_refuse, "max_norm changes a weight by its numbers")


def require_no_rescaling(weight: Tensor, input: Tensor, max_norm: float, norm_type: float) -> None:
    """Raise if a captured program would rescale rows of a weight that may be differentiated."""
    if may_be_differentiated() and _exceed(weight.detach().norm(norm_type, dim=1, keepdim=True), input, max_norm):
        raise RouteError(_rescaled("embedding", max_norm))


def _exceed(norms: Tensor, input: Tensor, max_norm: float) -> bool:
    """Whether torch would rescale a row that is looked up; True if numbers cannot be read."""
    if torch.compiler.is_compiling() or not (has_numbers(norms) and has_numbers(input)):
        return True
    last = max(norms.shape[0] - 1, 0)  # torch raises for rows after it
    found = norms.index_select(0, input.reshape(-1).clamp(0, last))
    return any_holds(found > max_norm * (1 + _ROUNDING * torch.finfo(norms.dtype).eps))


def _declined(weight: Tensor, max_norm: Any, scale_grad_by_freq: Any, sparse: Any, padding_idx: Any) -> Declined | None:
    """Return the reason to decline options that no rule for rows of a weight supports, or None."""
    if not weight.is_floating_point() or weight.dim() != 2:
        return INVALID
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return INVALID
    if max_norm is not None:
        return unable("max_norm changes the weight in place")
    if scale_grad_by_freq:
        return unable("scale_grad_by_freq scales gradients, of which none is taken")
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
    plain = _without_options("embedding_bag", weight, input, scale_grad_by_freq, max_norm, norm_type)
    if plain is not None:
        weight, max_norm, scale_grad_by_freq = plain, None, False
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
    plain = _without_options("embedding", weight, input, scale_grad_by_freq, max_norm, norm_type)
    if plain is not None:
        weight, max_norm, scale_grad_by_freq = plain, None, False
    if padding_idx is None:
        return UNNEEDED if plain is None else F.embedding(input, weight, sparse=sparse)
    if weight.dim() != 2 or not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return INVALID
    rows = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), rows.detach(), rows)


@_padded(torch.embedding)
def _embedding_by_number(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    plain = _without_options("embedding", weight, indices, scale_grad_by_freq, None)
    if plain is not None:
        weight, scale_grad_by_freq = plain, False
    if padding_idx < 0:
        return UNNEEDED if plain is None else torch.embedding(weight, indices, sparse=sparse)
    rows = torch.embedding(weight, indices, -1, scale_grad_by_freq, sparse)
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
