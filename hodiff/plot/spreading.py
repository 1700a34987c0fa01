"""Places on a line, moved apart as little as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression


def spread(wanted: Sequence[float], gaps: Sequence[float], within: tuple[float, float] | None = None) -> list[float]:
    r"""Solve $\min_x \sum_i (x_i - w_i)^2$ under $x_{i+1} - x_i \ge g_i$ and, if they have room, between two ends."""
    offsets = np.concatenate([[0.0], np.cumsum(gaps)])
    if within is not None:
        room = within[1] - within[0]
        offsets *= room / max(offsets[-1], room) if room else 0.0
    # Without the gaps it is a monotone fit; with bounds, the clipped fit solves it.
    fitted = isotonic_regression(np.asarray(wanted, dtype=float) - offsets).x
    if within is not None:
        fitted = fitted.clip(within[0], within[1] - offsets[-1])
    return [float(each) for each in fitted + offsets]
