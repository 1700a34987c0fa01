"""Coloring of a sparse matrix's pattern, so that few products give all of its entries."""

from __future__ import annotations

from typing import Any

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.sparse.coloring.coloring import SIDES, Coloring
from hodiff.sparse.coloring.coloring_problems import PROBLEMS
from hodiff.sparse.coloring.compressed_patterns import pattern_of, require_symmetric
from hodiff.sparse.coloring.vertex_orders import ORDERS

_USUAL = ("natural", "largest-first", "smallest-last")


def color(pattern: Any, method: str = "star", order: str | tuple[str, ...] | None = None) -> Coloring:
    r"""Color the pattern of a sparse matrix, so that few products give all of its entries.

    $$ B = A S, \qquad S_{jc} = 1 \text{ where column } j \text{ has the color } c $$

    The least number of colors is NP-hard to find. Vertices are colored greedily in several orders, and the best
    coloring is kept. A band is colored by arithmetic.

    Args:
        pattern: A SciPy sparse matrix in any format, or a sparse tensor, whose stored entries count, with zeros; or a
            dense boolean array or tensor.
        method: "star" or "acyclic" for a symmetric matrix, a Hessian: entries are read from the products, or come by
            substitution, which takes fewer products and rounds more. For a Jacobian "columns", by products with it,
            "rows", by products with its transpose, or "bidirectional", by both.
        order: The order of vertices: "natural", "largest-first", "smallest-last", "incidence-degree" or
            "dynamic-largest-first", or a tuple of them. By default the first three, bands, and, for
            "star", columns that share no row.

    Returns:
        The coloring: `decompress` recovers the entries from `num_colors` products with `seeds()`.

    Raises:
        InputError: If the pattern is not a matrix, or not symmetric where it has to be; if a name is unknown.

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
    problem = PROBLEMS[method](found)
    best: Coloring | None = None
    for attempt in problem.attempts(orders, arithmetic=order is None):
        if best is not None and best.num_colors <= max(attempt.least, problem.least):
            continue
        colors = attempt.colors()
        if colors is None:
            continue
        candidate = Coloring(method, attempt.order, found, **colors)
        if best is None or candidate.num_colors < best.num_colors:
            best = candidate
    assert best is not None
    return best


def _orders(order: Any) -> tuple[str, ...]:
    if order is None:
        return _USUAL
    names = order if isinstance(order, (tuple, list)) else (order,)
    if not names:
        raise InputError("color: order: expected at least one order, got none; omit order for the default.")
    for name in names:
        require_choice("color", "order", name, ORDERS)
    return tuple(names)
