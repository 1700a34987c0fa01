"""Colors from which no entry is recovered: their vertices become neutral, and need no product.

An entry (i, j) of a symmetric matrix can be read from the product of j's color at i, or of i's color at j. One of
them suffices, so that some colors may not be needed for any entry.
"""

from __future__ import annotations

import numpy as np

from hodiff.sparse.coloring.compressed_patterns import Array, Pattern
from hodiff.sparse.coloring.entries import readable

NEUTRAL = -1


def without_neutral(pattern: Pattern, colors: Array) -> Array:
    """Renumber the colors that a star or acyclic coloring of a symmetric pattern needs; others become NEUTRAL."""
    is_diagonal = pattern.rows == pattern.columns
    if is_diagonal.sum() == len(colors):
        return colors
    count = int(colors.max(initial=-1)) + 1
    needed = np.zeros(count, bool)
    needed[colors[pattern.rows[is_diagonal]]] = True
    own = readable(pattern, colors)
    mirrored = own[pattern.turned]
    # If neither can be read, the tree is not a star, and needs products of both colors.
    needed[colors[pattern.columns[~is_diagonal & ~mirrored]]] = True
    either = ~is_diagonal & own & mirrored
    needed |= _cover(colors[pattern.rows[either]], colors[pattern.columns[either]], needed)
    return renumbered(colors, needed)


def renumbered(colors: Array, needed: Array) -> Array:
    """Number colors without gaps; colors that are not needed become NEUTRAL."""
    numbers = np.where(needed, np.cumsum(needed) - 1, NEUTRAL).astype(np.int32)
    return np.where(colors < 0, NEUTRAL, numbers[colors]) if len(numbers) else colors


def _cover(first: Array, second: Array, needed: Array) -> Array:
    """Choose further colors until each pair has a needed color, always the color with most uncovered pairs."""
    count = len(needed)
    added = np.zeros(count, bool)
    left = ~(needed[first] | needed[second])
    if not left.any():
        return added
    first, second = np.concatenate([first[left], second[left]]), np.concatenate([second[left], first[left]])
    pairs = np.unique(first.astype(np.int64) * count + second)
    starts = np.searchsorted(pairs, np.arange(count + 1, dtype=np.int64) * count)
    others, degrees = pairs % count, np.diff(starts)
    while degrees.any():
        best = int(np.argmax(degrees))
        added[best] = True
        degrees[others[starts[best] : starts[best + 1]]] -= 1
        # Colors that were added have no uncovered pair left.
        degrees[added] = 0
    return added
