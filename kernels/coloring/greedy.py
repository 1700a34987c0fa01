"""Calls of the colorings in `greedy.cpp`, which take NumPy arrays and return colors, orders and forests.

A graph is given as `starts` (n + 1) and `columns`, compressed rows in int32. If
`hodiff.kernels.fused_library.available` is False, these functions cannot be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hodiff.kernels.fused_library import run

Array = np.ndarray[Any, np.dtype[Any]]

_WORD = 64


def distance2(starts: Array, rows: Array, order: Array, row_sizes: Array) -> Array:
    """Color columns so that columns of one color share no row; `starts` and `rows` are compressed columns."""
    colors = _none(len(starts) - 1)

    def attempt(words: int) -> int:
        room, memory, counts = _sets(row_sizes, words, 1)
        forbidden = np.empty(words, np.uint64)
        return _run("distance2", len(colors), starts, rows, order, words, room, memory, counts, forbidden, colors)

    # At least as many colors are needed as the longest row has entries.
    _with_enough_words(attempt, int(row_sizes.max(initial=1)) * 9 // 8, len(colors))
    return colors


def star(
    starts: Array,
    columns: Array,
    order: Array,
    *,
    apart: bool = True,
    most: int | None = None,
) -> Array | None:
    """Color so that every path on four vertices has three colors; see `hodiff/sparse/coloring/interpreted.py`."""
    colors = _none(len(starts) - 1)

    def attempt(words: int) -> int:
        room, memory, counts = _sets(np.diff(starts), words, 3)
        forbidden, occurrences = np.empty(words, np.uint64), np.zeros(words * _WORD, np.int32)
        colors.fill(-1)
        tables = room, memory, counts, forbidden, occurrences, colors
        return _run("star", len(colors), starts, columns, order, int(apart), words, *tables)

    most = len(colors) if most is None else most
    enough = _with_enough_words(attempt, 2 * len(columns) // max(len(colors), 1), most)
    return colors if enough else None


def acyclic(starts: Array, columns: Array, order: Array) -> Array:
    """Color so that neighbours differ and no two colors form a cycle."""
    n, entries = len(starts) - 1, len(columns)
    colors, counts, occurrences = _none(n), np.zeros(n, np.int32), np.zeros(n, np.int32)
    nodes, parents, sizes = (np.empty(entries, np.int32) for _ in range(3))
    reached, forbidden, node_of = _none(entries), _none(n + 1), np.empty(n, np.int32)
    tables = nodes, counts, parents, sizes, reached, forbidden, occurrences, node_of, colors
    _run("acyclic", n, starts, columns, order, *tables)
    return colors


def dynamic_order(
    graph: tuple[Array, Array],
    rows: tuple[Array, Array] | None,
    degrees: Array,
    initial: Array,
    rising: bool,
    least: bool,
) -> Array:
    """Order vertices so that the least or the largest current degree is always next; see `vertex_orders.py`."""
    n = len(degrees)
    most = int(degrees.max(initial=0))
    start = np.zeros(n, np.int32) if rising else degrees.astype(np.int32)
    heads, next_, previous = _none(most + 1), np.empty(n, np.int32), np.empty(n, np.int32)
    order, first = np.empty(n, np.int32), 0 if rising else most
    tables = heads, next_, previous, start, _none(n), order
    _run("order", n, *graph, *(rows or (None, None)), initial, int(rising), int(least), first, *tables)
    return order


def shared_row_degrees(graph: tuple[Array, Array], rows: tuple[Array, Array]) -> Array:
    """Count for each column the other columns that share a row with it."""
    n = len(graph[0]) - 1
    degrees = np.empty(n, np.int32)
    _run("degrees", n, *graph, *rows, _none(n), degrees)
    return degrees


def pairs(starts: Array, columns: Array, colors: Array, count: int) -> tuple[Array, Array]:
    """Number the pairs of row and column color; return the pair of each entry, and the size of each pair."""
    numbers, sizes = np.empty(len(columns), np.int32), np.empty(len(columns), np.int32)
    found = _run("pairs", len(starts) - 1, starts, columns, colors, _none(count), numbers, sizes)
    return numbers, sizes[:found]


def forest(nodes: int, first: Array, second: Array) -> tuple[Array, Array, Array, Array]:
    """Root a forest, given its edges: parents, -1 for roots; places in a depth-first walk; sizes; depths."""
    degrees, parents = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
    queue, sizes, places, depths = (np.empty(nodes, np.int32) for _ in range(4))
    _run("forest", nodes, len(first), first, second, degrees, parents, queue, sizes, places, depths)
    return parents, places, sizes, depths


def _none(count: int) -> Array:
    return np.full(count, -1, np.int32)


def _sets(sizes: Array, words: int, kinds: int) -> tuple[Array, Array, Array]:
    """Allocate the sets of colors of each vertex: offsets, memory, and the lengths of sets that are lists."""
    lists = (sizes.astype(np.int64) + 1) // 2
    room = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(np.minimum(lists, words), out=room[1:])
    counts = np.repeat(np.where(lists < words, 0, -1).astype(np.int32), kinds)
    return room, np.zeros(kinds * int(room[-1]), np.uint64), counts


def _with_enough_words(attempt: Callable[[int], int], guess: int, most: int) -> bool:
    """Color with room for the guessed number of colors, and retry with more until it suffices, up to `most`."""
    enough = -(-max(most, 1) // _WORD)
    words = min(guess // _WORD + 1, enough)
    while attempt(words) < 0:
        if words == enough:
            return False
        words = min(2 * words, enough)
    return True


def _run(name: str, *arguments: int | Array | None) -> int:
    return run(
        f"hodiff_color_{name}", *(each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments)
    )
