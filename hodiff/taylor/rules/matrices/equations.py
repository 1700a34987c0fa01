"""Sums of products and linear maps of coefficients, for solving matrix equations order by order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hodiff.taylor.jets_in_arguments import Batched, along_directions, moves
from hodiff.taylor.series import Coefficient, Frame, plus


def series_of(frame: Frame, x: Any) -> Sequence[Coefficient]:
    """The coefficients of a jet, or of a constant."""
    return x.coefficients if moves(frame, x) else (x, *[None] * frame.order)


def between(
    frame: Frame, function: Callable[..., Any], a: Sequence[Coefficient], b: Sequence[Coefficient], k: int
) -> Coefficient:
    """The sum of B(a_i, b_{k-i}) over 0 < i < k, as it enters coefficient k."""
    total: Coefficient = None
    for i in range(1, k):
        if a[i] is not None and b[k - i] is not None:
            pair = (Batched(a[i], frame.has_axis(i)), Batched(b[k - i], frame.has_axis(k - i)))
            total = plus(total, along_directions(function, pair, {}))
    return frame.summed(k, total)


def mapped(frame: Frame, k: int, function: Callable[[Any], Any], x: Coefficient) -> Coefficient:
    """Apply a linear map to coefficient k."""
    return None if x is None else along_directions(function, (Batched(x, frame.has_axis(k)),), {})
