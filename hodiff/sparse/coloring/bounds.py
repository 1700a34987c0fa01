"""Colorings of bands by arithmetic, and lower bounds on the number of colors.

All entries of a row lie within a window around the diagonal. Vertex i gets the color i mod w: with w the length of the
window, columns of one color share no row; with w = β + 1, where β is how far from the diagonal entries lie, two colors
form paths and no cycle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hodiff.sparse.coloring.patterns import Pattern

Array = np.ndarray[Any, np.dtype[Any]]


def band_of(pattern: Pattern) -> tuple[int, int]:
    """Largest distances of entries below and above the diagonal, at least 0."""
    if not pattern.entries:
        return 0, 0
    # Columns increase within a row: its first and last entries are enough.
    filled = np.flatnonzero(np.diff(pattern.starts))
    first, last = pattern.columns[pattern.starts[filled]], pattern.columns[pattern.starts[filled + 1] - 1]
    return max(int((filled - first).max()), 0), max(int((last - filled).max()), 0)


def cyclic_colors(count: int, colors: int) -> Array:
    """Colors 0, 1, ..., repeated cyclically."""
    return (np.arange(count, dtype=np.int32) % colors).astype(np.int32)


def has_full_diagonal(pattern: Pattern) -> bool:
    """Whether each row has its diagonal entry."""
    return int((pattern.rows == pattern.columns).sum()) == pattern.shape[0]


def least_acyclic(pattern: Pattern) -> int:
    """Lower bound on the number of colors in an acyclic coloring of a symmetric pattern."""
    n = pattern.shape[0]
    edges = (pattern.entries - int((pattern.rows == pattern.columns).sum())) // 2
    # Each pair of k colors forms a forest, which has fewer edges than vertices. Summed over pairs there are at most
    # (k - 1) n - k (k - 1) / 2 edges. A full band attains this number.
    k = min(n, 1)
    while (k - 1) * n - k * (k - 1) // 2 < edges:
        k += 1
    return k


def least_star(pattern: Pattern) -> int:
    """Lower bound on the number of colors in a star coloring of a symmetric pattern."""
    # The bound is 2 β + 1 for a full band of more than 3 β rows, else the bound of acyclic colorings.
    n, beta = pattern.shape[0], max(band_of(pattern))
    edges = (pattern.entries - int((pattern.rows == pattern.columns).sum())) // 2
    if beta and n > 3 * beta and edges == beta * n - beta * (beta + 1) // 2:
        return 2 * beta + 1
    return least_acyclic(pattern)
