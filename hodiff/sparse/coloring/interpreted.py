"""Python versions of the loops in `hodiff.kernels.coloring.greedy`, for systems without a C++ compiler.

Results are the same as the compiled loops', but slow. Sets of colors are integers whose bits are the colors, so that
conditions read as in the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from hodiff.sparse.coloring.compressed_patterns import Array


def distance2(starts: Array, rows: Array, order: Array, row_sizes: Array) -> Array:
    """Color columns so that no two of one color share a row; `starts` and `rows` are compressed columns."""
    seen = [0] * len(row_sizes)
    columns = _lists(starts, rows)
    colors = np.empty(len(columns), np.int32)
    for v in order.tolist():
        forbidden = 0
        for row in columns[v]:
            forbidden |= seen[row]
        colors[v], bit = _first_free(forbidden)
        for row in columns[v]:
            seen[row] |= bit
    return colors


def star(
    starts: Array,
    columns: Array,
    order: Array,
    *,
    apart: bool = True,
    most: int | None = None,
) -> Array | None:
    """Color so that every path on four vertices has three colors; None if more than `most` colors were taken."""
    # With `apart`, neighbours must have different colors, too.
    graph = _graph(starts, columns)
    n = len(graph)
    colors = [-1] * n
    # For each vertex: colors of its neighbours, colors of at least two neighbours, and colors of the hubs of stars
    # whose spoke it is.
    seen, twice, hubs = [0] * n, [0] * n, [0] * n
    for v in order.tolist():
        colored = [w for w in graph[v] if colors[w] >= 0]
        once, repeated = _bits_of_colors(colors, colored)
        forbidden = once if apart else 0
        for w in colored:
            forbidden |= seen[w] if repeated >> colors[w] & 1 else hubs[w]
        color, bit = _first_free(forbidden)
        # Round up to whole words of 64 colors, as the compiled loops do.
        if most is not None and color >= -(-max(most, 1) // 64) * 64:
            return None
        colors[v] = color
        for w in graph[v]:
            own = 1 << colors[w] if colors[w] >= 0 else 0
            if seen[w] & bit:
                hubs[v] |= own
                if own and not twice[w] & bit:
                    hubs[next(x for x in graph[w] if x != v and colors[x] == color)] |= own
                twice[w] |= bit
            elif own & repeated:
                hubs[w] |= bit
            seen[w] |= bit
    return np.asarray(colors, np.int32)


def acyclic(starts: Array, columns: Array, order: Array) -> Array:
    """Color so that neighbours differ and no two colors form a cycle."""
    graph = _graph(starts, columns)
    colors = [-1] * len(graph)
    # A node is a vertex with a color of its neighbours. A node belongs to the tree of these two colors.
    nodes: list[dict[int, int]] = [{} for _ in graph]
    parents: list[int] = []

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for v in order.tolist():
        colored = [w for w in graph[v] if colors[w] >= 0]
        forbidden, repeated = _bits_of_colors(colors, colored)
        reached = set()
        for w in colored:
            if repeated >> colors[w] & 1:
                for color, node in nodes[w].items():
                    if not forbidden >> color & 1:
                        tree = root(node)
                        if tree in reached:
                            forbidden |= 1 << color
                        reached.add(tree)
        color, _ = _first_free(forbidden)
        colors[v] = color
        for w in graph[v]:
            node = nodes[w].setdefault(color, len(parents))
            if node == len(parents):
                parents.append(node)
            if colors[w] >= 0:
                parents[root(node)] = root(nodes[v][colors[w]])
    return np.asarray(colors, np.int32)


def dynamic_order(
    graph: tuple[Array, Array],
    rows: tuple[Array, Array] | None,
    degrees: Array,
    initial: Array,
    rising: bool,
    least: bool,
) -> Array:
    """Order vertices so that the one with the least or the largest current degree is next; see `vertex_orders.py`."""
    near, n = _near(graph, rows), len(degrees)
    current = [0] * n if rising else degrees.tolist()
    # Dictionaries keep the order of insertion, and popitem returns the last item.
    buckets: list[dict[int, None]] = [{} for _ in range(int(degrees.max(initial=0)) + 1)]
    for v in initial.tolist():
        buckets[current[v]][v] = None
    order = np.empty(n, np.int32)
    ordered = [False] * n
    at = 0 if rising or least else len(buckets) - 1
    for i in range(n):
        while not buckets[at]:
            at += 1 if least else -1
        v, _ = buckets[at].popitem()
        ordered[v] = True
        order[n - 1 - i if least else i] = v
        for w in near(v):
            if ordered[w]:
                continue
            del buckets[current[w]][w]
            current[w] += 1 if rising else -1
            buckets[current[w]][w] = None
            at = min(at, current[w]) if least else max(at, current[w])
    return order


def shared_row_degrees(graph: tuple[Array, Array], rows: tuple[Array, Array]) -> Array:
    """Number of other columns that share a row with each column."""
    near = _near(graph, rows)
    return np.asarray([len(near(v)) for v in range(len(graph[0]) - 1)], np.int32)


def pairs(starts: Array, columns: Array, colors: Array, count: int) -> tuple[Array, Array]:
    """Number the pairs (row, color of the column) of all entries; return the numbers and the sizes of pairs."""
    rows = np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))
    keys = rows * count + colors[columns]
    _, first, numbers, sizes = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    # Number pairs by their first occurrence.
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[numbers], sizes[np.argsort(first)].astype(np.int32)


def forest(nodes: int, first: Array, second: Array) -> tuple[Array, Array, Array, Array]:
    """Root a forest given by edges; return parents (-1 for roots), places in a depth-first walk, sizes, depths."""
    n, left, near = nodes, [0] * nodes, [0] * nodes
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        left[a] += 1
        left[b] += 1
        near[a] ^= b
        near[b] ^= a
    queue, sizes, removed = [v for v in range(n) if left[v] == 1], [1] * n, []
    # Leaves are removed layer by layer. The exclusive or of a leaf's neighbours is the neighbour that is left.
    for v in queue:
        if left[v]:
            parent = near[v]
            near[parent] ^= v
            sizes[parent] += sizes[v]
            left[parent] -= 1
            if left[parent] == 1:
                queue.append(parent)
            removed.append(v)
    places, depths = [0] * n, [-1] * n
    place = 0
    for v in sorted(set(range(n)).difference(removed)):
        near[v], places[v] = -1, place - 1
        place += sizes[v] - 1
    taken = [0] * n
    for v in reversed(removed):
        parent = near[v]
        places[v] = places[parent] + 1 + taken[parent]
        taken[parent] += sizes[v]
        depths[v] = depths[parent] + 1
    found = (np.asarray(each, np.int32) for each in (near, places, sizes, depths))
    return next(found), next(found), next(found), next(found)


def _near(graph: tuple[Array, Array], rows: tuple[Array, Array] | None) -> Callable[[int], list[int]]:
    """Neighbours of a vertex: in the graph, or, if rows are given, columns that share a row with it."""
    if rows is None:
        return _graph(*graph).__getitem__
    own, others = _lists(*graph), _lists(*rows)
    return lambda v: [w for w in dict.fromkeys(w for row in own[v] for w in others[row]) if w != v]


def _lists(starts: Array, columns: Array) -> list[list[int]]:
    ends, flat = starts.tolist(), columns.tolist()
    return [flat[a:b] for a, b in pairwise(ends)]


def _graph(starts: Array, columns: Array) -> list[list[int]]:
    """Neighbours of each vertex, without itself."""
    return [[w for w in row if w != v] for v, row in enumerate(_lists(starts, columns))]


def _first_free(forbidden: int) -> tuple[int, int]:
    """The first color that is not forbidden, and its bit."""
    bit = ~forbidden & (forbidden + 1)
    return bit.bit_length() - 1, bit


def _bits_of_colors(colors: list[int], vertices: list[int]) -> tuple[int, int]:
    """Colors of some vertices, and colors of two or more of them."""
    once = repeated = 0
    for v in vertices:
        bit = 1 << colors[v]
        repeated |= once & bit
        once |= bit
    return once, repeated
