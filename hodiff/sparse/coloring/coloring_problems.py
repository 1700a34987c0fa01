"""Coloring problem of each method: its vertices, its greedy coloring, and the colors that it returns.

Bands are colored by arithmetic. All entries of a row lie within a window around the diagonal. Vertex i gets the color
i mod w: with w the length of the window, columns of one color share no row; with w = β + 1, where β is how far from the
diagonal entries lie, two colors form paths and no cycle.

Where products of rows and of columns are used, entries of long rows are read from products of rows, all other entries
from products of columns. Then columns must differ only where they share a short row. If short rows have at most t
entries, t colors may suffice for them, and each long row takes about one color. So t is chosen to minimize t + the
number of rows that are longer. The same applies with rows and columns exchanged. The idea is from Coleman & Verma 1998,
who remove rows and columns one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from hodiff.sparse.coloring.compressed_patterns import Array, Pattern
from hodiff.sparse.coloring.entries import NEUTRAL, renumbered, without_neutral
from hodiff.sparse.coloring.loops import loops
from hodiff.sparse.coloring.vertex_orders import ORDERS, Vertices


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


Sides = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Attempt:
    """One way to color a pattern.

    Attributes:
        order: Name of the order.
        least: Lower bound on its number of products.
        colors: Computes colors of columns, of rows or of both, by the field names of `Coloring`; None if it gave up.
    """

    order: str
    least: int
    colors: Callable[[], Sides | None]


@dataclass(frozen=True, eq=False)
class Problem:
    """A pattern to be colored by one method.

    Attributes:
        least: Lower bound on the number of products of any coloring.
        attempts: Yields attempts, by the names of orders and, if asked for, by arithmetic.
    """

    least: int
    attempts: Callable[..., Iterator[Attempt]]


def _greedy(
    vertices: Vertices, run: Callable[[Array], Array], finish: Callable[[Array], Sides], cyclic: int, least: int
) -> Problem:
    """Color greedily in each order, and cyclically along the diagonal: first if that is optimal, else last."""
    in_turn = Attempt("cyclic", cyclic, lambda: finish(cyclic_colors(vertices.count, cyclic)))

    def by(order: str) -> Sides:
        return finish(run(ORDERS[order](vertices)))

    def attempts(orders: tuple[str, ...], arithmetic: bool) -> Iterator[Attempt]:
        if arithmetic and cyclic <= least:
            yield in_turn
        for name in orders:
            yield Attempt(name, least, partial(by, name))
        # Colors that may be neutral are looked for among few alone.
        if arithmetic and least < cyclic:
            yield in_turn

    return Problem(least, attempts)


def _star(pattern: Pattern) -> Problem:
    def run(order: Array) -> Array:
        return loops().star(pattern.starts, pattern.columns, order)

    problem = _symmetric(pattern, run, 2 * max(band_of(pattern)) + 1, least_star)
    sizes = np.diff(pattern.starts)

    def apart() -> Sides:
        natural = ORDERS["natural"](Vertices(pattern))
        return {
            "column_colors": without_neutral(
                pattern, loops().distance2(pattern.starts, pattern.columns, natural, sizes)
            )
        }

    def attempts(orders: tuple[str, ...], arithmetic: bool) -> Iterator[Attempt]:
        yield from problem.attempts(orders, arithmetic)
        if arithmetic:
            # On regular meshes a coloring whose columns share no row, which is a star coloring, needs fewer colors than
            # first fit.
            yield Attempt("distance-2", int(sizes.max(initial=0)) if problem.least > 1 else problem.least, apart)

    return Problem(problem.least, attempts)


def _acyclic(pattern: Pattern) -> Problem:
    def run(order: Array) -> Array:
        return loops().acyclic(pattern.starts, pattern.columns, order)

    return _symmetric(pattern, run, max(band_of(pattern)) + 1, least_acyclic)


def _symmetric(
    pattern: Pattern, run: Callable[[Array], Array], cyclic: int, least: Callable[[Pattern], int]
) -> Problem:
    def finish(colors: Array) -> Sides:
        return {"column_colors": without_neutral(pattern, colors)}

    # If a diagonal entry is missing, colors may be neutral, which the bounds do not consider.
    bound = least(pattern) if has_full_diagonal(pattern) else min(pattern.entries, 1)
    return _greedy(Vertices(pattern), run, finish, cyclic, bound)


def _columns(pattern: Pattern) -> Problem:
    return _one_sided("column_colors", pattern, pattern.transposed)


def _rows(pattern: Pattern) -> Problem:
    return _one_sided("row_colors", pattern.transposed, pattern)


def _one_sided(name: str, rows: Pattern, columns: Pattern) -> Problem:
    """Color columns so that no two of one color share a row; entries of one row need different colors."""
    sizes = np.diff(rows.starts)
    filled = np.diff(columns.starts) > 0

    def run(order: Array) -> Array:
        return loops().distance2(columns.starts, columns.columns, order, sizes)

    def finish(colors: Array) -> Sides:
        return {name: compact(np.where(filled, colors, NEUTRAL))}

    return _greedy(Vertices(columns, rows), run, finish, sum(band_of(rows)) + 1, int(sizes.max(initial=0)))


def _bidirectional(pattern: Pattern) -> Problem:
    """Split entries between columns and rows first, or color both as vertices of one graph."""
    height, width = pattern.shape
    columns = pattern.transposed
    both = Pattern(
        (width + height, width + height),
        np.concatenate([columns.starts, pattern.entries + pattern.starts[1:]]).astype(np.int32),
        np.concatenate([columns.columns + width, pattern.columns]).astype(np.int32),
    )
    vertices = Vertices(both)

    def by(order: str, most: int) -> Sides | None:
        found = loops().star(both.starts, both.columns, ORDERS[order](vertices), apart=False, most=most)
        if found is None:
            return None
        # Columns and rows have separate colors. All of them together decide which colors are needed.
        found[width:] += int(found[:width].max(initial=-1)) + 1
        kept = without_neutral(both, found)
        return {"column_colors": compact(kept[:width]), "row_colors": compact(kept[width:])}

    def attempts(orders: tuple[str, ...], arithmetic: bool) -> Iterator[Attempt]:
        halves = [each for part in parts(pattern) for each in _halves(part, orders, arithmetic)]
        yield from halves
        # First fit may give all columns one color, and then all rows different ones. It gives up as soon as that shows.
        fair = 4 * min(each.least for each in halves)
        for name in orders:
            yield Attempt(name, min(pattern.entries, 1), partial(by, name, fair))

    return Problem(min(pattern.entries, 1), attempts)


def _halves(part: Part, orders: tuple[str, ...], arithmetic: bool) -> Iterator[Attempt]:
    """Color columns for some entries, and rows for the rest; vertices without entries of their own are neutral."""
    columns, rows = _columns(part.by_columns), _rows(part.by_rows)
    many, few = (columns, rows) if part.by_columns.entries >= part.by_rows.entries else (rows, columns)

    def both(attempt: Attempt) -> Sides:
        first = next(few.attempts(orders, arithmetic))
        return {**(attempt.colors() or {}), **(first.colors() or {})}

    for each in many.attempts(orders, arithmetic):
        yield Attempt(each.order, each.least + few.least, partial(both, each))


def compact(colors: Array) -> Array:
    """Renumber colors, without colors that no vertex has."""
    used = np.zeros(int(colors.max(initial=-1)) + 1, bool)
    used[colors[colors >= 0]] = True
    return renumbered(colors, used)


PROBLEMS: dict[str, Callable[[Pattern], Problem]] = {
    "star": _star,
    "acyclic": _acyclic,
    "columns": _columns,
    "rows": _rows,
    "bidirectional": _bidirectional,
}
