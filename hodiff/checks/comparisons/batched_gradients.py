"""Batched gradients by `torch.func.vmap`, for rules that the older batching in `gradcheck` lacks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.checks.attempts import attempt

_BATCH = 3
_TOLERANCE = 1e-8

LeavesFunction = Callable[..., tuple[Tensor, ...]]


def batches_well(function: LeavesFunction, point: tuple[Tensor, ...], order: int) -> bool:
    """Whether gradients (or at order 2, their gradients) in a batch equal single gradients."""

    def agree() -> bool:
        differentiated, at = function, point
        for _ in range(order):
            incoming = tuple(torch.ones_like(y) for y in differentiated(*at))
            differentiated, constants, at = _pullback(differentiated, len(at)), at, (*at, *incoming)
        batch = [torch.stack([(1.0 + i) * u + i for i in range(_BATCH)]) for u in incoming]
        dims = (*(None for _ in constants), *(0 for _ in batch))
        together = torch.func.vmap(differentiated, in_dims=dims, randomness="same")(*constants, *batch)
        single = [differentiated(*constants, *(b[i] for b in batch)) for i in range(_BATCH)]
        pairs = zip(together, (torch.stack(each) for each in zip(*single, strict=True)), strict=True)
        return all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in pairs)

    return attempt(agree) is True


def _pullback(function: LeavesFunction, count: int) -> LeavesFunction:
    """Return the gradient as a function of the first `count` arguments and the incoming gradients."""

    def pulled(*given: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = torch.func.vjp(function, *given[:count])[1](given[count:])
        return gradients

    return pulled
