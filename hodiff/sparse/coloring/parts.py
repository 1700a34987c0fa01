"""Which entries of a matrix are read from products of rows, and which from products of columns, for both together.

Those of long rows are read from products of rows, all others from products of columns. Then columns only have to differ
where they share a short row, for which t colors may do, the length of the longest of these; a long row takes a color of
its own, more or less. The sum, t + how many rows are longer than t, says which rows are long. The same with rows and
columns exchanged. The idea is that of Coleman & Verma 1998, who take rows and columns off one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hodiff.sparse.coloring.patterns import Pattern

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Part:
    """Entries that are read from products with the matrix, and those from products with its transpose."""

    by_columns: Pattern
    by_rows: Pattern


def parts(pattern: Pattern) -> Iterator[Part]:
    """By long rows, and by long columns; then all entries by columns, and all by rows."""
    everything, nothing = pattern, pattern.some_of(np.zeros(pattern.entries, bool))
    rows, columns = _long(np.diff(pattern.starts)), _long(np.diff(pattern.transposed.starts))
    if rows.any():
        in_rows = rows[pattern.rows]
        yield Part(pattern.some_of(~in_rows), pattern.some_of(in_rows))
    if columns.any():
        in_columns = columns[pattern.columns]
        yield Part(pattern.some_of(in_columns), pattern.some_of(~in_columns))
    yield Part(everything, nothing)
    yield Part(nothing, everything)


def _long(lengths: Array) -> Array:
    """Which of some rows are long."""
    counts = np.bincount(lengths, minlength=1)
    longer = len(lengths) - np.cumsum(counts)
    return lengths > int(np.argmin(np.arange(len(counts)) + longer))
