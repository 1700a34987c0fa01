"""Which rows and columns a bidirectional coloring leaves out: each entry needs its row or its column, not both.

Entries in long rows are read from products of rows, all others from products of columns. Then the columns of one short
row all take different colors, so that there are at least t, the length of the longest short row; and a long row takes a
color of its own, more or less. The sum, t + how many rows are longer than t, says which rows are long. The same with
rows and columns exchanged. The idea is that of Coleman & Verma 1998, who take rows and columns off one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hodiff.sparse.coloring.patterns import Pattern

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Cover:
    """What is neutral, and what can come of it.

    Attributes:
        neutral: Whether columns, then rows, are; None if none is.
        least: No such coloring has fewer products.
        most: With more colors it is given up; None if never.
    """

    neutral: Array | None
    least: int
    most: int | None = None


def covers(pattern: Pattern) -> Iterator[Cover]:
    """Those by long rows and by long columns, and one that decides nothing."""
    lengths = np.diff(pattern.starts), np.diff(pattern.transposed.starts)
    long, few = _long(lengths[0]), _long(lengths[1])
    # Columns that only have entries in long rows are left out with the short rows.
    needed = np.zeros(pattern.shape[1], bool)
    needed[pattern.columns[~long[pattern.rows]]] = True
    yield Cover(np.concatenate([~needed, ~long]), _least(lengths[0], long))
    needed = np.zeros(pattern.shape[0], bool)
    needed[pattern.rows[~few[pattern.columns]]] = True
    yield Cover(np.concatenate([~few, ~needed]), _least(lengths[1], few))
    # First fit may make all columns alike at first, and all rows different then.
    fair = min(_least(lengths[0], long), _least(lengths[1], few))
    yield Cover(None, min(pattern.entries, 1), 4 * fair)


def _long(lengths: Array) -> Array:
    """Which of some rows are long."""
    longest, counts = int(lengths.max(initial=0)), np.bincount(lengths, minlength=1)
    longer = len(lengths) - np.cumsum(counts)
    return lengths > int(np.argmin(np.arange(longest + 1) + longer))


def _least(lengths: Array, long: Array) -> int:
    return int(lengths[~long].max(initial=0)) + bool(long.any())
