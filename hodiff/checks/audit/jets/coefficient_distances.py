"""Distances between Taylor coefficients by jets and by an oracle, where the oracle knows them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.checks.audit.jets.oracles import Coefficients

# Relative tolerance of neighbouring intervals, within which interpolated values settle a number.
SETTLED = 1e-7


def distances(found: list[list[Tensor | None]], right: list[Coefficients], order: int) -> dict[int, float]:
    """Return the largest distance of all outputs by order; orders without a known number are omitted."""
    if len(found) != len(right):
        return dict.fromkeys(range(order + 1), math.inf)
    distances: dict[int, float] = {}
    for k in range(order + 1):
        errors = [_distance(own, each, k) for own, each in zip(found, right, strict=True)]
        known = [error for error in errors if error is not None]
        if known:
            distances[k] = max(known)
    return distances


def _distance(own: Sequence[Tensor | None], right: Coefficients, k: int) -> float | None:
    expected = right.numbers[k]
    got = own[k]
    got = torch.zeros_like(expected) if got is None else got.detach()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    known = torch.isfinite(expected)
    if right.errors is None:
        if not torch.equal(torch.isfinite(got), known):
            return math.inf
    else:
        known = _settled(right, k)
    if not known.any():
        return None if right.errors is not None and expected.numel() else 0.0
    return _relative(got[known], expected[known])


def _settled(right: Coefficients, k: int) -> Tensor:
    """Return a mask of the numbers whose intervals agree."""
    assert right.errors is not None
    size = 1 + right.numbers[k].abs().nan_to_num(0.0, 0.0, 0.0)
    return torch.isfinite(right.numbers[k]) & (right.errors[k] <= SETTLED * size)


def settled_everywhere(right: list[Coefficients], k: int) -> bool:
    """Whether values settle every number of a coefficient."""
    return all(bool(_settled(each, k).all()) for each in right)


def distance_of_sums(found: list[list[Tensor | None]], plain: list[list[Tensor | None]], order: int) -> float:
    """Return the distance of collapsed jets to plain jets, whose highest coefficient is summed."""
    worst = 0.0
    for own, right in zip(found, plain, strict=True):
        for k in range(order + 1):
            if own[k] is None and right[k] is None:
                continue
            got, expected = _dense(own[k], right[k], k == order)
            finite = torch.isfinite(expected)
            if got.shape != expected.shape or not torch.equal(torch.isfinite(got), finite):
                return math.inf
            worst = max(worst, _relative(got[finite], expected[finite]))
    return worst


def _relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / (1 + expected.abs().max())).item() if got.numel() else 0.0


def slack_of(plain: list[list[Tensor | None]]) -> float:
    """Return a factor of tolerances for outputs coarser than double precision; 1 for double precision."""
    coarsest = max(torch.finfo(own[0].dtype).eps for own in plain if own[0] is not None)
    return coarsest / torch.finfo(torch.float64).eps / 1e4 if coarsest > 1e-10 else 1.0


def _dense(got: Tensor | None, expected: Tensor | None, summed: bool) -> tuple[Tensor, Tensor]:
    """Return both as tensors, with zeros for None; `expected` is summed over the directions if `summed`."""
    if expected is not None and summed:
        expected = expected.sum(0)
    # The caller skips the case that both are None.
    zeros = torch.zeros_like(next(each for each in (got, expected) if each is not None))
    return zeros if got is None else got, zeros if expected is None else expected
