"""Rules for losses whose derivatives in torch include terms that are overwritten, clamped, masked or not finite."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.distances.norms import pairwise_distance
from hodiff.corrections.rules.losses.reduction import DEPRECATED, REDUCE
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import any_holds
from hodiff.torch_internals.tensors import has_numbers

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


@register(
    F.gaussian_nll_loss,
    routes=ROUTES,
    reason="the routes differ where the variance is less than eps",
    reference="torch's manual: derivatives ignore that the variance is clamped",
)
def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    if not isinstance(var, Tensor) or not may_be_differentiated((var,)):
        return UNNEEDED
    # Without numbers, or in compiled code, the loss of a negative variance is NaN instead of torch's error.
    readable = not torch.compiler.is_compiling() and has_numbers(var)
    if reduction not in REDUCE or (readable and any_holds(var.detach() < 0)):
        return INVALID
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    differ = [a != b for a, b in zip(input.shape, var.shape, strict=False)]
    if input.dim() != var.dim() or sum(differ) > 1:
        return INVALID
    # The value is eps, and the derivatives of every order are those of the variance.
    var = torch.where(var.detach() < eps, eps + (var - var.detach()), var)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return REDUCE[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)


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


@register(
    F.triplet_margin_loss,
    routes=ROUTES,
    reason="second derivatives are NaN at distances of 0; third derivatives that mix modes raise an error",
    reference="the rule of torch.nn.functional.pairwise_distance",
)
def _triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return unable(DEPRECATED)
    if not may_be_differentiated((anchor, positive, negative)):
        return UNNEEDED
    if not anchor.dim() == positive.dim() == negative.dim() or margin <= 0 or reduction not in REDUCE:
        return INVALID

    def distance(x: Tensor, y: Tensor) -> Tensor:
        found = pairwise_distance(x, y, p, eps)
        return found if isinstance(found, Tensor) else torch.pairwise_distance(x, y, p, eps)

    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return REDUCE[reduction]((margin + near - far).clamp_min(0))
