"""Derivatives and jumps of a function of one number, from its values alone."""

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
    """Return derivatives of order 0 to k at points, (k + 1, n), and their differences from results of smaller reach."""
    # Derivatives of the polynomial through values at Chebyshev's points within the reach, with an error of about 1e-16
    # over the reach to the power of the order. The other two see more of one side, so that results differ at a kink.
    wide = _derivatives(f, points, order, reach, 0.0)
    others = [_derivatives(f, points, order, reach / 2, shift) for shift in (-0.8, 0.8)]
    return wide, np.maximum(*(np.abs(each - wide) for each in others))


def settled(found: np.ndarray, doubt: np.ndarray, scale: float) -> np.ndarray:
    """Mask of points at which differences determine a derivative: beside a jump, they grow as their reach shrinks."""
    return doubt <= UNSETTLED * (np.abs(found) + scale)


def _derivatives(
    f: Callable[[np.ndarray], np.ndarray], points: np.ndarray, order: int, reach: float, shift: float
) -> np.ndarray:
    nodes = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES) + shift
    values = f(points + reach * nodes[:, None])
    found: np.ndarray = KroghInterpolator(nodes, values).derivatives(0.0, der=order + 1)
    return found / reach ** np.arange(order + 1)[:, None]


def jumps(f: Callable[[np.ndarray], np.ndarray], points: np.ndarray) -> np.ndarray:
    """Return the places where f jumps, halving intervals between points; smooth parts take few evaluations."""
    values = f(points)
    least = UNSETTLED * span_of([values])
    left, right, below, above = points[:-1], points[1:], values[:-1], values[1:]
    with np.errstate(invalid="ignore"):
        for _ in range(HALVINGS):
            # In shorter intervals a smooth function changes less and less, while a jump keeps its height.
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
    # A jump at a point, such as that of the sign, is found from both sides.
    apart = np.diff(found, prepend=-np.inf) > 1e-6 * (points[-1] - points[0])
    return found[apart]


def without_derivative(missing: np.ndarray, jumping: np.ndarray, step: float) -> np.ndarray:
    """Return the jumps, and the points without a derivative that no jump explains."""
    lonely = (np.abs(missing[:, None] - jumping) > 1.001 * step).all(1)
    return np.concatenate([missing[lonely], jumping])


def keep_rounding_small(ax: Axes, scale: float) -> None:
    """Widen the axis of a curve that is flat up to rounding, so that it looks flat."""
    low, high = ax.get_ylim()
    if high - low < 1e-6 * scale:
        middle = 0.0 if abs(low + high) < 1e-6 * scale else (low + high) / 2
        ax.set_ylim(middle - scale / 20, middle + scale / 20)


def span_of(curves: list[np.ndarray]) -> float:
    """Return the height of the curves, 1 if they are flat."""
    finite = [curve[np.isfinite(curve)] for curve in curves]
    numbers = np.concatenate(finite)
    return float(np.ptp(numbers)) or 1.0 if len(numbers) else 1.0


def height_of(values: np.ndarray) -> float:
    """Return the largest finite absolute value."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def mark_missing(ax: Axes, points: np.ndarray) -> None:
    """Draw dotted lines where there is no derivative, with one entry in the legend."""
    for i, point in enumerate(np.unique(points)):
        ax.axvline(point, color="gray", linestyle=":", linewidth=0.8, label="no derivative" if i == 0 else "_missing")
