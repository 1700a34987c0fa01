"""Derivatives of a function of one number from its values alone, and where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from scipy.interpolate import KroghInterpolator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODES = 13  # of the polynomial around a point
UNSETTLED = 0.01  # relative: by how much differences of two sizes differ where there is no derivative
HALVINGS = 40  # of an interval with a jump inside


def from_values(
    f: Callable[[np.ndarray], np.ndarray], points: np.ndarray, order: int, reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives of order 0 to k at points, (k + 1, n), and how far others of a smaller reach are from them."""
    # Those of the polynomial through values at Chebyshev's points within the reach, which is right to about 1e-16 over
    # the reach to the power of the order. The others see more of one side, so that a kink does not look alike to all.
    wide = _derivatives(f, points, order, reach, 0.0)
    others = [_derivatives(f, points, order, reach / 2, shift) for shift in (-0.8, 0.8)]
    return wide, np.maximum(*(np.abs(each - wide) for each in others))


def settled(found: np.ndarray, doubt: np.ndarray, scale: float) -> np.ndarray:
    """Where differences tell a derivative: beside a jump, they grow as their reach shrinks."""
    return doubt <= UNSETTLED * (np.abs(found) + scale)


def _derivatives(
    f: Callable[[np.ndarray], np.ndarray], points: np.ndarray, order: int, reach: float, shift: float
) -> np.ndarray:
    nodes = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES) + shift
    values = f(points + reach * nodes[:, None])
    found: np.ndarray = KroghInterpolator(nodes, values).derivatives(0.0, der=order + 1)
    return found / reach ** np.arange(order + 1)[:, None]


def jumps(f: Callable[[np.ndarray], np.ndarray], points: np.ndarray) -> np.ndarray:
    """Where f jumps, between two of the points each; few values are asked where it does not."""
    values = f(points)
    least = UNSETTLED * span_of([values])
    left, right, below, above = points[:-1], points[1:], values[:-1], values[1:]
    with np.errstate(invalid="ignore"):
        for _ in range(HALVINGS):
            # A smooth function climbs less and less in a shorter interval, a jump stays as high as it is.
            high = np.abs(above - below) > least
            left, right, below, above = left[high], right[high], below[high], above[high]
            if not len(left):
                break
            middle = (left + right) / 2
            there = f(middle)
            first = ~(np.abs(above - there) > np.abs(there - below))
            left, below = np.where(first, left, middle), np.where(first, below, there)
            right, above = np.where(first, middle, right), np.where(first, there, above)
        found = (left + right)[np.abs(above - below) > least] / 2
    # One that is at a point, as that of the sign, is found from both of its sides.
    apart = np.diff(found, prepend=-np.inf) > 1e-6 * (points[-1] - points[0])
    return found[apart]


def without_derivative(missing: np.ndarray, jumping: np.ndarray, step: float) -> np.ndarray:
    """The jumps, and those points without a derivative that no jump explains."""
    lonely = (np.abs(missing[:, None] - jumping) > 1.001 * step).all(1)
    return np.concatenate([missing[lonely], jumping])


def keep_rounding_small(ax: Axes, scale: float) -> None:
    """Give a curve that is flat to rounding an axis on which it looks so."""
    low, high = ax.get_ylim()
    if high - low < 1e-6 * scale:
        middle = 0.0 if abs(low + high) < 1e-6 * scale else (low + high) / 2
        ax.set_ylim(middle - scale / 20, middle + scale / 20)


def span_of(curves: list[np.ndarray]) -> float:
    """The height of what is drawn, 1 where it is flat."""
    finite = [curve[np.isfinite(curve)] for curve in curves]
    numbers = np.concatenate(finite)
    return float(np.ptp(numbers)) or 1.0 if len(numbers) else 1.0


def height_of(values: np.ndarray) -> float:
    """The largest finite number, without its sign."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def mark_missing(ax: Axes, points: np.ndarray) -> None:
    """Dotted lines where there is no derivative, once in the legend."""
    for i, point in enumerate(np.unique(points)):
        ax.axvline(point, color="gray", linestyle=":", linewidth=0.8, label="no derivative" if i == 0 else "_missing")
