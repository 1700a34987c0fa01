"""Rules for losses with masked terms, whose derivatives in torch include NaN or overwritten terms."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.losses.reduction import DEPRECATED, REDUCE
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated

# torch adds it to the squared lengths.
_SQUARE = 1e-12


_poisson = partial(
    register,
    name="torch.nn.functional.poisson_nll_loss",
    routes=ROUTES,
    reason="with full=True, derivatives with respect to a target of 0 or less are NaN",
    reference="Stirling's formula if the target is greater than 1",
)


@_poisson(F.poisson_nll_loss)
def _poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    size_average: bool | None = None,
    eps: float = 1e-8,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if not full:
        return UNNEEDED
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    return _full_poisson_nll_loss(input, target, log_input, full, eps, reduction)


@_poisson(torch.poisson_nll_loss)
def _full_poisson_nll_loss(
    input: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int | str
) -> Any:
    if not full or not may_be_differentiated((target,)):
        return UNNEEDED
    if reduction not in REDUCE:
        return INVALID
    loss = input.exp() - target * input if log_input else input - target * (input + eps).log()
    larger = target > 1
    safe = torch.where(larger, target, 1)
    stirling = safe * safe.log() - safe + 0.5 * (2 * math.pi * safe).log()
    return REDUCE[reduction](loss + torch.where(larger, stirling, 0))


_cosine = partial(
    register,
    name="torch.nn.functional.cosine_embedding_loss",
    reason="third derivatives that mix modes are wrong or raise an error",
    reference="elementary operators",
)


@_cosine(F.cosine_embedding_loss)
def _cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    return _loss_of_cosines(input1, input2, target, margin, reduction)


@_cosine(torch.cosine_embedding_loss)
def _loss_of_cosines(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, reduction: int | str = 1
) -> Any:
    if not may_be_differentiated((input1, input2)):
        return UNNEEDED
    rank = target.dim()
    if rank > 1 or not rank < input1.dim() == input2.dim() == rank + 1 or reduction not in REDUCE:
        return INVALID
    squares = [each.square().sum(rank) + _SQUARE for each in (input1, input2)]
    cosine = (input1 * input2).sum(rank) / (squares[0] * squares[1]).sqrt()
    apart = (cosine - margin).clamp_min(0)
    return REDUCE[reduction](torch.where(target == 1, 1 - cosine, torch.where(target == -1, apart, 0)))
