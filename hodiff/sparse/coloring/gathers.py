"""Direct recovery: each entry is an element of the products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hodiff.sparse.coloring.compressed_patterns import Array, Pattern
from hodiff.sparse.coloring.loops import loops


@dataclass(frozen=True, eq=False)
class Gather:
    r"""Entries that are read from one block of products: `values[entries] = products[rows, colors]`.

    Attributes:
        side: Which products: "columns", $A S$ with seeds that add columns up, or "rows", $A^\top S$.
        entries: The entries' numbers in the order of compressed rows, increasing.
        rows: Row of the products for each entry.
        colors: Column of the products for each entry.
    """

    side: str
    entries: Array
    rows: Array
    colors: Array

    def read(self, products: Array) -> Array:
        """Read the values of the entries."""
        return products[self.rows, self.colors]


def by_columns(pattern: Pattern, colors: Array) -> Gather:
    """All entries, where columns of one color share no row."""
    return Gather("columns", np.arange(pattern.entries), pattern.rows, colors[pattern.columns])


def by_rows(pattern: Pattern, colors: Array) -> Gather:
    """All entries, where rows of one color share no column."""
    return Gather("rows", np.arange(pattern.entries), pattern.columns, colors[pattern.rows])


def by_stars(pattern: Pattern, colors: Array) -> Gather:
    """All entries of a symmetric pattern, read from the column's color or from the mirror image's."""
    own = readable(pattern, colors)
    rows = np.where(own, pattern.rows, pattern.columns)
    return Gather("columns", np.arange(pattern.entries), rows, colors[np.where(own, pattern.columns, pattern.rows)])


def by_both(pattern: Pattern, row_colors: Array, column_colors: Array) -> tuple[Gather, Gather]:
    """Entries that are alone in their row among columns of their color, and the rest, alone in their column."""
    own = readable(pattern, column_colors)
    columns, rows = np.flatnonzero(own), np.flatnonzero(~own)
    return (
        Gather("columns", columns, pattern.rows[columns], column_colors[pattern.columns[columns]]),
        Gather("rows", rows, pattern.columns[rows], row_colors[pattern.rows[rows]]),
    )


def readable(pattern: Pattern, colors: Array) -> Array:
    """Whether an entry's column has a color, and no other column of that color has an entry in the row."""
    count = int(colors.max(initial=-1)) + 2
    numbers, sizes = loops().pairs(pattern.starts, pattern.columns, np.where(colors < 0, count - 1, colors), count)
    return (sizes[numbers] == 1) & (colors[pattern.columns] >= 0)
