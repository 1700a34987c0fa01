"""Recovery by substitution: the edges of two-colored trees, from sums over the nodes below them.

The product of color a at vertex v is the sum of the entries (v, w) with w of color a. These are the edges at one node
of the tree of both colors, so that each product is the sum of the edges at its node. With a root, the edge above a node
u is the product there minus the edges below, which are computed in the same way:

    x(u) = b(u) - sum over children w of x(w) = sum over nodes w below u, and u itself, of (-1)^(depth w - depth u) b(w)

The last form requires no order. The nodes below u are consecutive in a depth-first walk, so that one cumulative sum
gives all edges. Alternatively, sums over descendants double their reach until they reach the leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hodiff.sparse.coloring.compressed_patterns import Array, Pattern
from hodiff.sparse.coloring.loops import loops

# Up to this many doublings are faster than a cumulative sum.
FEW_DOUBLINGS = 4


@dataclass(frozen=True, eq=False)
class Substitution:
    """Unknowns, one for an edge or a diagonal entry, in the order of a depth-first walk from the trees' centres.

    Attributes:
        rows: Row of the products from which each unknown is read.
        colors: Column of the products from which each unknown is read.
        signs: 1 or -1, as the depth is even or odd.
        parents: Next unknown towards the root; `len(rows)` if there is none.
        ends: Unknown i and all unknowns below it are the range from i to `ends[i]`, exclusive.
        doublings: Rounds after which sums over descendants are complete; 0 if all unknowns are read directly.
        unknowns: Unknown of each entry of the pattern; an entry and its mirror image share one.
    """

    rows: Array
    colors: Array
    signs: Array
    parents: Array
    ends: Array
    doublings: int
    unknowns: Array

    def read(self, products: Array) -> Array:
        """Compute the entries' values, by doubling where that takes few rounds, else by a cumulative sum."""
        found = products[self.rows, self.colors]
        if self.doublings <= FEW_DOUBLINGS or not np.isfinite(found).all():
            # A cumulative sum would carry infinities and NaN into trees that have none.
            return self.by_doubling(found)[self.unknowns]
        return self.by_cumulative_sum(found)[self.unknowns]

    def by_doubling(self, found: Array) -> Array:
        """Compute the unknowns from products, by sums over descendants at distance less than 1, 2, 4, ..."""
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
        """Compute the unknowns from products, by differences of one cumulative sum, in float64 at least."""
        if not len(found):
            return found
        signed = found * self.signs
        if found.dtype.kind in "fc":
            signed = signed.astype(np.result_type(found, np.float64))
        # The total of a tree is subtracted where the next tree begins. Otherwise the sum and its rounding errors would
        # grow.
        tops = np.flatnonzero(self.parents == len(found))
        totals = np.add.reduceat(signed, tops)
        signed[tops[1:]] -= totals[:-1]
        walk = np.cumsum(signed)
        below = walk[self.ends - 1]
        below[1:] -= walk[:-1]
        below[tops] = totals
        return (below * self.signs).astype(found.dtype)


def by_trees(pattern: Pattern, colors: Array) -> Substitution:
    """Substitution for all entries of a symmetric pattern, if no two colors form a cycle."""
    upper = np.flatnonzero(pattern.rows < pattern.columns)
    lower = pattern.turned[upper]
    diagonal = np.flatnonzero(pattern.rows == pattern.columns)
    edges, count = len(upper), len(upper) + len(diagonal)
    entries, places, parents, ends, depths = _rooted(pattern, colors, upper, lower)
    unknowns = np.empty(pattern.entries, np.int64)
    unknowns[upper] = unknowns[lower] = places
    unknowns[diagonal] = np.arange(edges, count)
    # Entry whose row and color identify the product of each unknown, in the order of the walk.
    named = np.concatenate([_placed(places, entries), diagonal])
    parents = _placed(places, parents)
    return Substitution(
        rows=pattern.rows[named],
        colors=colors[pattern.columns[named]],
        signs=np.concatenate([_placed(places, 1 - 2 * (depths % 2)), np.ones_like(diagonal)]).astype(np.int8),
        parents=np.concatenate([np.where(parents < 0, count, parents), np.full_like(diagonal, count)]),
        ends=np.concatenate([_placed(places, ends), unknowns[diagonal] + 1]),
        doublings=int(depths.max(initial=0)).bit_length(),
        unknowns=unknowns,
    )


def _rooted(pattern: Pattern, colors: Array, upper: Array, lower: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Entry that names each edge's node away from the root; that node's place, parent, end and depth."""
    # An edge joins the nodes of an entry above the diagonal and of its mirror image.
    count = int(colors.max(initial=-1)) + 2
    nodes, sizes = loops().pairs(pattern.starts, pattern.columns, np.where(colors < 0, count - 1, colors), count)
    first, second = nodes[upper], nodes[lower]
    parents, places, below, depths = loops().forest(len(sizes), first, second)
    is_child = parents[first] == second
    child = np.where(is_child, first, second)
    # An isolated edge can be read at both ends, but one end may have no product: it becomes the root.
    alone = (sizes[first] == 1) & (sizes[second] == 1)
    unread = colors[pattern.columns[np.where(is_child, upper, lower)]] < 0
    entries = np.where(is_child ^ (alone & unread), upper, lower)
    above = parents[child]
    inner = np.where(depths[above] < 0, -1, places[above])
    return entries, places[child], inner, places[child].astype(np.int64) + below[child], depths[child]


def _placed(places: Array, values: Array) -> Array:
    """Values of edges, in the order of their places."""
    placed = np.empty_like(values)
    placed[places] = values
    return placed
