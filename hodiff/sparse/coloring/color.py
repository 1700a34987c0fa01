"""Coloring the pattern of a sparse matrix, so that few products give all of its entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.sparse.coloring.bounds import band_of, cyclic_colors, has_full_diagonal, least_acyclic, least_star
from hodiff.sparse.coloring.coloring import SIDES, Coloring
from hodiff.sparse.coloring.loops import loops
from hodiff.sparse.coloring.neutral import NEUTRAL, renumbered, without_neutral
from hodiff.sparse.coloring.orders import ORDERS, Vertices
from hodiff.sparse.coloring.patterns import Pattern, pattern_of, require_symmetric

Array = np.ndarray[Any, np.dtype[Any]]

# What gives the colors of a band.
CYCLIC = "cyclic"
_USUAL = ("natural", "largest-first", "smallest-last")


def color(pattern: Any, method: str = "star", order: str | tuple[str, ...] | None = None) -> Coloring:
    r"""Color the pattern of a sparse matrix, so that few products give all of its entries.

    $$ B = A S, \qquad S_{jc} = 1 \text{ where column } j \text{ has the color } c $$

    A pattern's minimal number of colors is NP-hard to find. Vertices are colored greedily, in several orders, of which the
    best is kept; a band is colored by arithmetic.

    Args:
        pattern: A matrix of SciPy, in any format, or a sparse tensor, whose stored entries count, zeros too; or a dense
            boolean array or tensor.
        method: "star" or "acyclic" for a symmetric matrix, a Hessian: entries are read from the products, or come by
            substitution, which takes fewer products and rounds more. "columns" for a Jacobian by products with it, "rows"
            by products with its transpose, "bidirectional" by both.
        order: The order of vertices: "natural", "largest-first", "smallest-last", "incidence-degree" or
            "dynamic-largest-first", or a tuple of them. By default the first three, and bands, until none can be better.

    Returns:
        The coloring: `num_colors` products, with `seeds()`, from which `decompress` makes the entries.

    Raises:
        InputError: If the pattern is no matrix, or not symmetric where it has to be; if a name is unknown.

    Example:
        >>> import numpy as np, scipy.sparse
        >>> from hodiff.sparse.coloring import color
        >>> n = 1000
        >>> arrow = scipy.sparse.eye_array(n, format="lil")
        >>> arrow[0], arrow[:, 0] = 1, 1
        >>> color(arrow)
        Coloring('star', 1,000 x 1,000, 2,998 entries, 2 colors)
        >>> color(arrow, "columns").num_colors
        1000

    Source: A. Gebremedhin, F. Manne & A. Pothen, "What color is your Jacobian?", SIAM Review 47, 2005; A. Gebremedhin,
    A. Tarafdar, F. Manne & A. Pothen, "New acyclic and star coloring algorithms", SIAM J. Sci. Comput. 29, 2007;
    A. Montoison, G. Dalle & A. Gebremedhin, "Revisiting sparse matrix coloring and bicoloring", 2025.
    """
    require_choice("color", "method", method, SIDES)
    orders = _orders(order)
    found = pattern_of("color", pattern)
    if method in {"star", "acyclic"}:
        require_symmetric("color", method, found)
    problem = _PROBLEMS[method](found)
    best: Coloring | None = None
    for name, colors in problem.candidates(orders, bands=order is None):
        if name == CYCLIC and best is not None and problem.cyclic >= best.num_colors:
            continue
        candidate = Coloring(method, name, found, **problem.finish(colors))
        if best is None or candidate.num_colors < best.num_colors:
            best = candidate
        if best.num_colors <= problem.least:
            break
    assert best is not None
    return best


def _orders(order: Any) -> tuple[str, ...]:
    if order is None:
        return _USUAL
    names = order if isinstance(order, (tuple, list)) else (order,)
    if not names:
        raise InputError("color: order: expected one order at least, got none; leave it out for the usual ones.")
    for name in names:
        require_choice("color", "order", name, ORDERS)
    return tuple(names)


@dataclass(frozen=True, eq=False)
class _Problem:
    """What a method colors, and what becomes of the colors.

    Attributes:
        vertices: What is colored.
        greedy: The colors that an order gives.
        cyclic: How many colors along the diagonal do; None where that is not tried.
        least: A number of products that none can go below.
        finish: The `Coloring`'s fields: colors of sides, without what is not needed.
    """

    vertices: Vertices
    greedy: Callable[[Array], Array]
    cyclic: int | None
    least: int
    finish: Callable[[Array], dict[str, Array]]

    def candidates(self, orders: tuple[str, ...], bands: bool) -> Iterator[tuple[str, Array]]:
        """Colors, by the name of what gave them."""
        count = self.vertices.count
        # Other patterns than bands may lie in a wide one, which is no reason to begin with it.
        narrow = bands and self.cyclic is not None and self.cyclic <= self.least
        if narrow and self.cyclic:
            yield CYCLIC, cyclic_colors(count, self.cyclic)
        for name in orders:
            yield name, self.greedy(ORDERS[name](self.vertices))
        if bands and not narrow and self.cyclic:
            yield CYCLIC, cyclic_colors(count, self.cyclic)


def _star(pattern: Pattern) -> _Problem:
    return _symmetric(
        pattern,
        lambda order: loops().star(pattern.starts, pattern.columns, order, True),
        2 * max(band_of(pattern)) + 1,
        least_star,
    )


def _acyclic(pattern: Pattern) -> _Problem:
    return _symmetric(
        pattern,
        lambda order: loops().acyclic(pattern.starts, pattern.columns, order),
        max(band_of(pattern)) + 1,
        least_acyclic,
    )


def _symmetric(pattern: Pattern, greedy: Any, cyclic: int, least: Callable[[Pattern], int]) -> _Problem:
    # Without some diagonal entry colors may be neutral, of which the bounds know nothing.
    bound = least(pattern) if has_full_diagonal(pattern) else 0
    return _Problem(
        Vertices(pattern), greedy, cyclic, bound, lambda colors: {"column_colors": without_neutral(pattern, colors)}
    )


def _columns(pattern: Pattern) -> _Problem:
    return _one_sided("column_colors", pattern, pattern.transposed)


def _rows(pattern: Pattern) -> _Problem:
    return _one_sided("row_colors", pattern.transposed, pattern)


def _one_sided(name: str, rows: Pattern, columns: Pattern) -> _Problem:
    """Columns of which none share a row; entries of one row take a color each."""
    sizes = np.diff(rows.starts)
    filled = np.diff(columns.starts) > 0
    below, above = band_of(rows)

    def finish(colors: Array) -> dict[str, Array]:
        colors = np.where(filled, colors, NEUTRAL)
        return {name: renumbered(colors, np.bincount(colors[filled], minlength=int(colors.max(initial=-1)) + 1) > 0)}

    return _Problem(
        Vertices(columns, rows),
        lambda order: loops().distance2(columns.starts, columns.columns, order, sizes),
        below + above + 1,
        int(sizes.max(initial=0)),
        finish,
    )


def _bidirectional(pattern: Pattern) -> _Problem:
    """Columns and rows as vertices of one graph, whose edges are the entries."""
    height, width = pattern.shape
    columns = pattern.transposed
    both = Pattern(
        (width + height, width + height),
        np.concatenate([columns.starts, pattern.entries + pattern.starts[1:]]).astype(np.int32),
        np.concatenate([columns.columns + width, pattern.columns]).astype(np.int32),
    )

    def finish(colors: Array) -> dict[str, Array]:
        # Columns and rows have colors of their own; one list of both decides which are needed.
        apart = colors.copy()
        apart[width:] += int(colors[:width].max(initial=-1)) + 1
        kept = without_neutral(both, apart)
        return {"column_colors": _from_zero(kept[:width]), "row_colors": _from_zero(kept[width:])}

    return _Problem(
        Vertices(both), lambda order: loops().star(both.starts, both.columns, order, False), None, 0, finish
    )


def _from_zero(colors: Array) -> Array:
    """Colors of one side, numbered without those of the other."""
    used = np.zeros(int(colors.max(initial=-1)) + 1, bool)
    used[colors[colors >= 0]] = True
    return renumbered(colors, used)


_PROBLEMS: dict[str, Callable[[Pattern], _Problem]] = {
    "star": _star,
    "acyclic": _acyclic,
    "columns": _columns,
    "rows": _rows,
    "bidirectional": _bidirectional,
}
