"""Rules for dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED, Declined, unable
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES

_no_forward = partial(register, kind="missing", routes=ROUTES[1:])
_SOURCE = "Srivastava et al. (2014), section 4"


@_no_forward(torch.native_dropout, reason="its backward has no forward rule", reference=_SOURCE)
def _native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    if not train or not input.is_floating_point():
        return UNNEEDED
    if not 0 < p < 1:
        return unable("all or nothing is kept")
    _, kept = torch.native_dropout(input.detach(), p, train)
    return input * kept.to(input.dtype) * (1 / (1 - p)), kept


@_no_forward(F.dropout, reason="on a GPU its backward has no forward rule", reference=_SOURCE)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not input.is_cuda:
        return UNNEEDED  # torch multiplies by a mask itself
    if inplace:
        return unable("the result is written into the input")
    dropped = _native_dropout(input, p, training)
    return dropped if isinstance(dropped, Declined) else dropped[0]


@_no_forward(
    torch.ops.aten.native_dropout_backward,
    torch.ops.aten.native_dropout_backward.default,
    name="torch.ops.aten.native_dropout_backward",
    reason="no forward rule",
    reference="it is linear",
)
def _native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad_output * mask.to(grad_output.dtype) * scale
