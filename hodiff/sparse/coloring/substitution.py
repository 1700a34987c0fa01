"""Recovery by substitution: the edges of two-colored trees, from sums over what hangs below them.

The product of color a at vertex v is the sum of the entries (v, w) with w of color a. These are the edges at one node of
the tree of both colors, so that each product is the sum of the edges at its node. With a root, the edge above a node u is
what remains of the product there once the edges below are taken off, and these are got likewise:

    x(u) = b(u) - sum over children w of x(w) = sum over nodes w below u, and u itself, of (-1)^(depth w - depth u) b(w)

The last form has no order in it. Below u are consecutive nodes of a depth-first walk, so that one cumulative sum gives all
edges; or sums over descendants are doubled in reach until they reach the leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hodiff.sparse.coloring.loops import loops
from hodiff.sparse.coloring.patterns import Pattern

Array = np.ndarray[Any, np.dtype[Any]]

# Up to so many doublings are faster than a cumulative sum, and round less.
_FEW = 4


@dataclass(frozen=True, eq=False)
class Substitution:
    """Unknowns, one for an edge or a diagonal entry, in the order of a depth-first walk from the trees' centres.

    Attributes:
        rows: For each unknown the row of the products that it is read from.
        colors: And the column.
        signs: 1 or -1, as the depth is even or odd.
        parents: The unknown next to it towards the root; `len(rows)` where there is none.
        ends: The unknowns below the i-th, and itself, are those from i to `ends[i]`.
        doublings: Rounds after which sums over descendants are complete; 0 where all is read directly.
        unknowns: For each entry of the pattern its unknown; an entry and its mirror image have the same.
    """

    rows: Array
    colors: Array
    signs: Array
    parents: Array
    ends: Array
    doublings: int
    unknowns: Array

    def read(self, products: Array) -> Array:
        """The entries' values, by doubling where that takes few rounds, else by a cumulative sum."""
        found = products[self.rows, self.colors]
        if self.doublings <= _FEW or not np.isfinite(found).all():
            # A cumulative sum would carry infinities and NaN into trees that have none.
            return self.by_doubling(found)[self.unknowns]
        return self.by_cumulative_sum(found)[self.unknowns]

    def by_doubling(self, found: Array) -> Array:
        """The unknowns, from their products: sums over descendants at distance less than 1, 2, 4, ..."""
        if not self.doublings:
            return found
        total, above = found * self.signs, np.append(self.parents, len(found))
        for _ in range(self.doublings):
            below = np.flatnonzero(above[:-1] < len(found))
            addend = total[below]
            np.add.at(total, above[below], addend)
            above = above[above]
        return total * self.signs

    def by_cumulative_sum(self, found: Array) -> Array:
        """The unknowns, from their products: differences of one sum over all of them, in float64 at least."""
        total = np.zeros(len(found) + 1, np.result_type(found, np.float64) if found.dtype.kind in "fc" else found.dtype)
        np.cumsum(found * self.signs, out=total[1:])
        return ((total[self.ends] - total[:-1]) * self.signs).astype(found.dtype)


def by_trees(pattern: Pattern, colors: Array) -> Substitution:
    """All entries of a symmetric pattern, where no two colors make a cycle."""
    count = int(colors.max(initial=-1)) + 2
    nodes, _ = loops().pairs(pattern.starts, pattern.columns, np.where(colors < 0, count - 1, colors), count)
    is_edge, is_diagonal = pattern.rows < pattern.columns, pattern.rows == pattern.columns
    mirror = pattern.turned
    above = np.flatnonzero(is_edge)
    children = _children(pattern, colors, nodes, above, mirror[above])
    edges, diagonal = len(above), np.flatnonzero(is_diagonal)
    # The entry whose row and color is the node below each edge, at the place that the walk gives it.
    entries = np.empty(edges + len(diagonal), np.int64)
    parents = np.full(len(entries), len(entries))
    depths, ends = np.zeros(len(entries), np.int64), np.arange(1, len(entries) + 1)
    places = children.places
    entries[places] = children.entries
    depths[places], ends[places] = children.depths, children.ends
    parents[places] = np.where(children.parents < 0, len(entries), children.parents)
    entries[edges:] = diagonal
    unknowns = np.empty(pattern.entries, np.int64)
    unknowns[above] = unknowns[mirror[above]] = places
    unknowns[diagonal] = np.arange(edges, len(entries))
    return Substitution(
        rows=pattern.rows[entries],
        colors=colors[pattern.columns[entries]],
        signs=(1 - 2 * (depths % 2)).astype(np.int8),
        parents=parents,
        ends=ends,
        doublings=int(depths.max(initial=0)).bit_length(),
        unknowns=unknowns,
    )


@dataclass(frozen=True, eq=False)
class _Children:
    """For each edge its node away from the root: an entry that names it, its place, that of its parent, and so on."""

    entries: Array
    places: Array
    parents: Array
    ends: Array
    depths: Array


def _children(pattern: Pattern, colors: Array, nodes: Array, above: Array, below: Array) -> _Children:
    """Root the trees, whose edges join the nodes of an entry above the diagonal and of its mirror image."""
    # Edges whose ends have no other edge have their root where the product is not made, if it is not.
    first, second = nodes[above], nodes[below]
    count = int(nodes.max(initial=-1)) + 1
    degrees = np.bincount(np.concatenate([first, second]), minlength=count).astype(np.int32)
    neighbors = np.zeros(count, np.int32)
    np.bitwise_xor.at(neighbors, first, second)
    np.bitwise_xor.at(neighbors, second, first)
    parents, places, sizes, depths = loops().forest(degrees, neighbors)
    is_child = parents[first] == second
    single = (degrees[first] == 1) & (degrees[second] == 1)
    neutral = single & (colors[pattern.columns[np.where(is_child, above, below)]] < 0)
    child = np.where(is_child, first, second)
    # Both ends of a single edge have its place, whichever is the root.
    chosen = is_child ^ neutral
    above_child = places[parents[child]]
    return _Children(
        entries=np.where(chosen, above, below),
        places=places[child],
        parents=np.where(depths[parents[child]] < 0, -1, above_child),
        ends=places[child] + sizes[child],
        depths=depths[child],
    )
