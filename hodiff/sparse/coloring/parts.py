"""Split of a matrix's entries between products of rows and products of columns, where both are used.

Entries of long rows are read from products of rows, all other entries from products of columns. Then columns must
differ only where they share a short row. If short rows have at most t entries, t colors may suffice for them, and each
long row takes about one color. So t is chosen to minimize t + the number of rows that are longer. The same applies with
rows and columns exchanged. The idea is from Coleman & Verma 1998, who remove rows and columns one by one.
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
    """Entries that are read from products with the matrix, and entries read from products with its transpose."""

    by_columns: Pattern
    by_rows: Pattern


def parts(pattern: Pattern) -> Iterator[Part]:
    """Yield the splits by long rows and by long columns; then all entries by columns, and all by rows."""
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
    """Mask of the rows that are long."""
    counts = np.bincount(lengths, minlength=1)
    longer = len(lengths) - np.cumsum(counts)
    return lengths > int(np.argmin(np.arange(len(counts)) + longer))
