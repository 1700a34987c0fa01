"""What needs no search: colorings of bands by arithmetic, and numbers of colors that no coloring goes below.

All entries of a row lie within a window around the diagonal. Vertex i gets the color i mod w: with w the length of the
window, columns of one color share no row; with w = β + 1, where β is how far from the diagonal entries lie, two colors
make paths and no cycle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hodiff.sparse.coloring.patterns import Pattern

Array = np.ndarray[Any, np.dtype[Any]]


def band_of(pattern: Pattern) -> tuple[int, int]:
    """How far entries lie below and above the diagonal; 0 at least."""
    if not pattern.entries:
        return 0, 0
    # Columns increase within a row: its first and last entries are enough.
    filled = np.flatnonzero(np.diff(pattern.starts))
    first, last = pattern.columns[pattern.starts[filled]], pattern.columns[pattern.starts[filled + 1] - 1]
    return max(int((filled - first).max()), 0), max(int((last - filled).max()), 0)


def cyclic_colors(count: int, colors: int) -> Array:
    """Colors 0, 1, ... again and again."""
    return (np.arange(count, dtype=np.int32) % colors).astype(np.int32)


def has_full_diagonal(pattern: Pattern) -> bool:
    """Whether each row has its diagonal entry."""
    return int((pattern.rows == pattern.columns).sum()) == pattern.shape[0]


def least_acyclic(pattern: Pattern) -> int:
    """Colors that an acyclic coloring of a symmetric pattern has at least."""
    n = pattern.shape[0]
    edges = (pattern.entries - int((pattern.rows == pattern.columns).sum())) // 2
    # Each pair of k colors makes a forest, of fewer edges than vertices. Summed over pairs there are at most
    # (k - 1) n - k (k - 1) / 2 edges. A full band has as many.
    k = min(n, 1)
    while (k - 1) * n - k * (k - 1) // 2 < edges:
        k += 1
    return k


def least_star(pattern: Pattern) -> int:
    """Colors that a star coloring of a symmetric pattern has at least."""
    # 2 β + 1 for a full band of more than 3 β rows, else as many as for an acyclic coloring.
    n, beta = pattern.shape[0], max(band_of(pattern))
    edges = (pattern.entries - int((pattern.rows == pattern.columns).sum())) // 2
    if beta and n > 3 * beta and edges == beta * n - beta * (beta + 1) // 2:
        return 2 * beta + 1
    return least_acyclic(pattern)
