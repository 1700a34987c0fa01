"""Coloring problem of each method: its vertices, its greedy coloring, and the colors that it returns."""

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
