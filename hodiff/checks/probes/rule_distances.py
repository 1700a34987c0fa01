"""Distances between the results of two calls of a rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Difference of sums in another order, in units of the rounding.
_ROUNDINGS = 1e4


def gap_of(a: tuple[Any, ...], b: tuple[Any, ...]) -> float:
    """Return the largest relative difference of two tuples' tensors; infinite if a nonzero tensor has no partner."""
    gaps = [0.0]
    for x, y in zip(a, b, strict=False):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            shown = [each for each in (x, y) if isinstance(each, Tensor)]
            gaps += [float("inf") for each in shown if bool(each.any())]
        elif x.shape == y.shape and x.numel():
            gaps.append(_relative(x, y))
    return max(gaps)


def rounding_of(eps: float) -> float:
    """Return the largest gap that counts as rounding in another order."""
    return min(_ROUNDINGS * eps, 0.1)


def _relative(x: Tensor, y: Tensor) -> float:
    if not (x.is_floating_point() or x.is_complex()):
        return float((x != y).any())
    size = float(x.abs().max())
    gap = float((x - y).abs().max())
    if gap != gap:
        return 0.0
    return gap / size if 0 < size < float("inf") else gap
