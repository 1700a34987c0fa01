"""Rules for dropout, also of features and with the statistics of SELU (`alpha_dropout`)."""

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
from hodiff.torch_internals.autograd.batching import draws_for_each
from hodiff.torch_internals.autograd.transforms import in_transform

_no_forward = partial(register, kind="missing", routes=ROUTES[1:])
_SOURCE = "Srivastava et al. (2014), section 4"


@_no_forward(torch.native_dropout, reason="its backward has no forward rule", reference=_SOURCE)
def _native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    if not train or not input.is_floating_point():
        return UNNEEDED
    if not 0 < p < 1:
        return unable("all or nothing is kept")
    if _reorders(input):
        kept = torch.empty_like(input.detach(), dtype=torch.bool).bernoulli_(1 - p)
    else:
        _, kept = torch.native_dropout(input.detach(), p, train)
    return input * kept.to(input.dtype) * (1 / (1 - p)), kept


def _reorders(input: Tensor) -> bool:
    """Whether torch draws the elements to drop in another order than outside of transforms: not that of memory."""
    if torch.compiler.is_compiling() or not input.is_cpu or input.is_contiguous():
        return False
    return in_transform() and not draws_for_each()


@_no_forward(
    F.dropout,
    torch.dropout,
    name="torch.nn.functional.dropout",
    reason="on a GPU its backward has no forward rule; for non-contiguous tensors, transforms drop different elements",
    reference=_SOURCE,
)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not input.is_cuda:
        if not training or not 0 < p < 1 or not input.is_floating_point() or not _reorders(input):
            return UNNEEDED  # torch multiplies by a mask itself
        factors = torch.empty_like(input.detach()).bernoulli_(1 - p).div_(1 - p)
        return input.mul_(factors) if inplace else input * factors
    if inplace:
        return unable("the result is written into the input")
    dropped = _native_dropout(input, p, training)
    return dropped if isinstance(dropped, Declined) else dropped[0]


# Minus the limit of SELU, which dropped elements take, as in torch.
_SATURATION = 1.7580993408473766


def _alpha_dropped(input: Tensor, p: float, train: bool, shape: Any) -> Any:
    """Compute alpha dropout as torch does, by the same random draw, but not in place."""
    if not train or p in (0, 1) or not input.is_floating_point() or not input.numel():
        return UNNEEDED
    if not 0 < p < 1:
        return INVALID
    kept = torch.empty_like(input) if shape is None else input.new_empty(shape)
    kept = kept.bernoulli_(1 - p)
    scale = 1 / math.sqrt((_SATURATION * _SATURATION * p + 1) * (1 - p))
    return input * (kept * scale) + ((kept - 1) * (_SATURATION * scale) + _SATURATION * scale * p)


_in_place = partial(
    register,
    kind="missing",
    routes=("forward-over-forward",),
    reason="it is computed in place, which raises an error for a tangent of zeros",
    reference="Klambauer et al. (2017), section 3",
)


@_in_place(torch.alpha_dropout, F.alpha_dropout)
def _alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return unable("the result is written into the input") if inplace else _alpha_dropped(input, p, training, None)


@_in_place(torch.feature_alpha_dropout, F.feature_alpha_dropout)
def _feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    if inplace:
        return unable("the result is written into the input")
    if input.dim() < 2:
        return INVALID
    return _alpha_dropped(input, p, training, [*input.shape[:2], *(1,) * (input.dim() - 2)])


@_no_forward(
    torch.ops.aten.native_dropout_backward,
    torch.ops.aten.native_dropout_backward.default,
    name="torch.ops.aten.native_dropout_backward",
    reason="no forward rule",
    reference="it is linear",
)
def _native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad_output * mask.to(grad_output.dtype) * scale
