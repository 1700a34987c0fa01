"""Colors that no entry is recovered from: their vertices become neutral, and need no product.

An entry (i, j) of a symmetric matrix can be read from the product of j's color at i, or from that of i's color at j.
One of them suffices, so that a color may be left which is needed for none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hodiff.sparse.coloring.gathers import readable
from hodiff.sparse.coloring.patterns import Pattern

Array = np.ndarray[Any, np.dtype[Any]]

NEUTRAL = -1


def without_neutral(pattern: Pattern, colors: Array) -> Array:
    """The colors of a symmetric pattern's star or acyclic coloring that are needed, renumbered; else NEUTRAL."""
    is_diagonal = pattern.rows == pattern.columns
    if is_diagonal.sum() == len(colors):
        return colors
    count = int(colors.max(initial=-1)) + 1
    needed = np.zeros(count, bool)
    needed[colors[pattern.rows[is_diagonal]]] = True
    own = readable(pattern, colors)
    mirrored = own[pattern.turned]
    # Where neither can be read the tree has more than a hub, and takes products of both colors.
    needed[colors[pattern.columns[~is_diagonal & ~mirrored]]] = True
    either = ~is_diagonal & own & mirrored
    needed |= _cover(colors[pattern.rows[either]], colors[pattern.columns[either]], needed)
    return renumbered(colors, needed)


def renumbered(colors: Array, needed: Array) -> Array:
    """Colors numbered without gaps, NEUTRAL where they are not needed."""
    numbers = np.where(needed, np.cumsum(needed) - 1, NEUTRAL).astype(np.int32)
    return np.where(colors < 0, NEUTRAL, numbers[colors]) if len(numbers) else colors


def _cover(first: Array, second: Array, needed: Array) -> Array:
    """Further colors, so that of each pair one is needed: at each turn the one that most pairs are left without."""
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
        # What was taken, and what only leads to it, has no pair left.
        degrees[added] = 0
    return added
