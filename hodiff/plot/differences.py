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


def span_of(curves: list[np.ndarray]) -> float:
    """The height of what is drawn, 1 where it is flat."""
    finite = [curve[np.isfinite(curve)] for curve in curves]
    numbers = np.concatenate(finite)
    return float(np.ptp(numbers)) or 1.0 if len(numbers) else 1.0


def mark_missing(ax: Axes, points: np.ndarray) -> None:
    """Dotted lines where there is no derivative, once in the legend."""
    for i, point in enumerate(np.unique(points)):
        ax.axvline(point, color="gray", linestyle=":", linewidth=0.8, label="no derivative" if i == 0 else "_missing")
