"""What each method colors: its vertices, what a greedy coloring of them is, and what becomes of the colors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hodiff.sparse.coloring.bounds import band_of, cyclic_colors, has_full_diagonal, least_acyclic, least_star
from hodiff.sparse.coloring.loops import loops
from hodiff.sparse.coloring.neutral import NEUTRAL, renumbered, without_neutral
from hodiff.sparse.coloring.orders import ORDERS, Vertices
from hodiff.sparse.coloring.parts import Part, parts
from hodiff.sparse.coloring.patterns import Pattern

Array = np.ndarray[Any, np.dtype[Any]]
Sides = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Attempt:
    """One way to color.

    Attributes:
        order: Its name.
        least: A number of products that it does not go below.
        colors: Colors it: those of columns, of rows or of both, by the names of the fields of `Coloring`; None where
            that was given up.
    """

    order: str
    least: int
    colors: Callable[[], Sides | None]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be colored.

    Attributes:
        least: A number of products that no coloring goes below.
        attempts: Ways to do it, by the names of orders and, if asked for, by arithmetic.
    """

    least: int
    attempts: Callable[..., Iterator[Attempt]]


def _greedy(
    vertices: Vertices, run: Callable[[Array], Array], finish: Callable[[Array], Sides], cyclic: int, least: int
) -> Problem:
    """By each order, and in turn along the diagonal: before all others where that cannot be improved, else last."""
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
            # On regular meshes columns that share no row, which are a star coloring, need fewer colors than first fit.
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

    # Without some diagonal entry colors may be neutral, of which the bounds know nothing.
    bound = least(pattern) if has_full_diagonal(pattern) else min(pattern.entries, 1)
    return _greedy(Vertices(pattern), run, finish, cyclic, bound)


def _columns(pattern: Pattern) -> Problem:
    return _one_sided("column_colors", pattern, pattern.transposed)


def _rows(pattern: Pattern) -> Problem:
    return _one_sided("row_colors", pattern.transposed, pattern)


def _one_sided(name: str, rows: Pattern, columns: Pattern) -> Problem:
    """Columns of which no two share a row; entries of one row take a color each."""
    sizes = np.diff(rows.starts)
    filled = np.diff(columns.starts) > 0

    def run(order: Array) -> Array:
        return loops().distance2(columns.starts, columns.columns, order, sizes)

    def finish(colors: Array) -> Sides:
        return {name: compact(np.where(filled, colors, NEUTRAL))}

    return _greedy(Vertices(columns, rows), run, finish, sum(band_of(rows)) + 1, int(sizes.max(initial=0)))


def _bidirectional(pattern: Pattern) -> Problem:
    """Entries shared out beforehand; or columns and rows as vertices of one graph, whose edges are the entries."""
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
        # Columns and rows have colors of their own; all of them together decide which are needed.
        found[width:] += int(found[:width].max(initial=-1)) + 1
        kept = without_neutral(both, found)
        return {"column_colors": compact(kept[:width]), "row_colors": compact(kept[width:])}

    def attempts(orders: tuple[str, ...], arithmetic: bool) -> Iterator[Attempt]:
        halves = [each for part in parts(pattern) for each in _halves(part, orders, arithmetic)]
        yield from halves
        # First fit may make all columns alike at first, and all rows different then: it is given up where that shows.
        fair = 4 * min(each.least for each in halves)
        for name in orders:
            yield Attempt(name, min(pattern.entries, 1), partial(by, name, fair))

    return Problem(min(pattern.entries, 1), attempts)


def _halves(part: Part, orders: tuple[str, ...], arithmetic: bool) -> Iterator[Attempt]:
    """Columns colored for some entries, rows for the others; each side is neutral where it has none of its own."""
    columns, rows = _columns(part.by_columns), _rows(part.by_rows)
    many, few = (columns, rows) if part.by_columns.entries >= part.by_rows.entries else (rows, columns)

    def both(attempt: Attempt) -> Sides:
        first = next(few.attempts(orders, arithmetic))
        return {**(attempt.colors() or {}), **(first.colors() or {})}

    for each in many.attempts(orders, arithmetic):
        yield Attempt(each.order, each.least + few.least, partial(both, each))


def compact(colors: Array) -> Array:
    """Colors numbered without those that no vertex has."""
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
