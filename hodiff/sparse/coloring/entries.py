"""Recovery of a sparse matrix's entries from products with its coloring's seeds, by torch's operators.

Products are rows here, (colors, length of a product), as vmap returns them.

Direct recovery: each entry is an element of the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.sparse.coloring.compressed_patterns import Array, Pattern
from hodiff.sparse.coloring.loops import loops
from hodiff.sparse.coloring.substitution import FEW_DOUBLINGS, Substitution
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.tensors import has_numbers


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


Entries = Callable[[Mapping[str, Tensor]], Tensor]


def reader(plan: tuple[Gather, ...] | Substitution, shape: tuple[int, int], device: torch.device) -> Entries:
    """Return a function that reads the values of entries, in compressed-row order, from the products by side."""
    if isinstance(plan, Substitution):
        return _by_substitution(plan, shape, device)
    return _by_gathers(plan, shape, device)


def _by_gathers(plan: tuple[Gather, ...], shape: tuple[int, int], device: torch.device) -> Entries:
    places = [_place(each, each.side, shape, device) for each in plan]
    if len(plan) == 1:
        side = plan[0].side
        return lambda products: products[side].reshape(-1).index_select(0, places[0])
    order = torch.cat([_index(each.entries, device) for each in plan]).argsort()

    def read(products: Mapping[str, Tensor]) -> Tensor:
        flat = [products[each.side].reshape(-1) for each in plan]
        parts = [each.index_select(0, place) for each, place in zip(flat, places, strict=True)]
        return torch.cat(parts).index_select(0, order)

    return read


def _by_substitution(plan: Substitution, shape: tuple[int, int], device: torch.device) -> Entries:
    place, unknowns = _place(plan, "columns", shape, device), _index(plan.unknowns, device)
    signs = torch.as_tensor(plan.signs, device=device)
    doubled, cumulated = _doubling(plan, device), _cumulation(plan, device)

    def read(products: Mapping[str, Tensor]) -> Tensor:
        found = products["columns"].reshape(-1).index_select(0, place)
        if plan.doublings:
            factors = signs.to(found.dtype)
            signed = found * factors
            # A cumulative sum would carry infinities and NaN into trees that have none. The sum is one pass, and is
            # finite only if all are.
            few = (
                plan.doublings <= FEW_DOUBLINGS
                or is_wrapped(found)
                or not has_numbers(found)
                or not math.isfinite(float(found.detach().sum()))
            )
            found = (doubled if few else cumulated)(signed) * factors
        return found.index_select(0, unknowns)

    return read


def substituted_sizes(plan: Substitution, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that computes, for each entry, the norm of itself and the entries it was computed from."""
    entries = np.empty(len(plan.rows), np.int64)
    entries[plan.unknowns] = np.arange(len(plan.unknowns))
    unknowns, entry = _index(plan.unknowns, device), _index(entries, device)
    summed = (_doubling if plan.doublings <= FEW_DOUBLINGS else _cumulation)(plan, device)

    def sizes(values: Tensor) -> Tensor:
        squares = values.nan_to_num(0, 0, 0).double().square().index_select(0, entry)
        # Differences of a cumulative sum may be slightly negative.
        below = summed(squares).clamp_min(0) if plan.doublings else squares
        return below.sqrt().to(values.dtype).index_select(0, unknowns)

    return sizes


def _doubling(plan: Substitution, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that sums over descendants at distance less than 1, 2, 4, ..."""
    count, steps = len(plan.rows), []
    above = np.append(plan.parents, count)
    for _ in range(plan.doublings):
        below = np.flatnonzero(above[:-1] < count)
        steps.append((_index(below, device), _index(above[below], device)))
        above = above[above]

    def summed(signed: Tensor) -> Tensor:
        for below, target in steps:
            signed = signed.index_add(0, target, signed.index_select(0, below))
        return signed

    return summed


def _cumulation(plan: Substitution, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that uses one cumulative sum in float64, as `Substitution.by_cumulative_sum` does."""
    tops = np.flatnonzero(plan.parents == len(plan.rows))
    tree = np.zeros(len(plan.rows), np.int64)
    tree[tops[1:]] = 1
    roots, trees, last = _index(tops, device), _index(np.cumsum(tree), device), _index(plan.ends - 1, device)

    def summed(signed: Tensor) -> Tensor:
        exact = signed.to(torch.promote_types(signed.dtype, torch.float64))
        totals = torch.zeros_like(exact[: len(roots)]).index_add(0, trees, exact)
        walk = exact.index_add(0, roots[1:], totals[:-1], alpha=-1).cumsum(0)
        before = torch.nn.functional.pad(walk[:-1], (1, 0))
        below = (walk.index_select(0, last) - before).index_copy(0, roots, totals)
        return below.to(signed.dtype)

    return summed


def _place(read: Gather | Substitution, side: str, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Positions in the flattened products of the elements that are read."""
    return _index(read.colors, device) * shape[0 if side == "columns" else 1] + _index(read.rows, device)


def _index(numbers: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(numbers, device=device).to(torch.int64)


NEUTRAL = -1


def without_neutral(pattern: Pattern, colors: Array) -> Array:
    """Renumber the colors that a star or acyclic coloring of a symmetric pattern needs; others become NEUTRAL."""
    # An entry (i, j) can be read from the product of j's color at i, or of i's color at j. One of them suffices, so
    # that some colors may not be needed for any entry.
    is_diagonal = pattern.rows == pattern.columns
    if is_diagonal.sum() == len(colors):
        return colors
    count = int(colors.max(initial=-1)) + 1
    needed = np.zeros(count, bool)
    needed[colors[pattern.rows[is_diagonal]]] = True
    own = readable(pattern, colors)
    mirrored = own[pattern.turned]
    # If neither can be read, the tree is not a star, and needs products of both colors.
    needed[colors[pattern.columns[~is_diagonal & ~mirrored]]] = True
    either = ~is_diagonal & own & mirrored
    needed |= _cover(colors[pattern.rows[either]], colors[pattern.columns[either]], needed)
    return renumbered(colors, needed)


def renumbered(colors: Array, needed: Array) -> Array:
    """Number colors without gaps; colors that are not needed become NEUTRAL."""
    numbers = np.where(needed, np.cumsum(needed) - 1, NEUTRAL).astype(np.int32)
    return np.where(colors < 0, NEUTRAL, numbers[colors]) if len(numbers) else colors


def _cover(first: Array, second: Array, needed: Array) -> Array:
    """Choose further colors until each pair has a needed color, always the color with most uncovered pairs."""
    count = len(needed)
    added = np.zeros(count, bool)
    left = ~(needed[first] | needed[second])
    if not left.any():
        return added
    first, second = np.concatenate([first[left], second[left]]), np.concatenate([second[left], first[left]])
    pairs = np.unique(first.astype(np.int64) * count + second)
    starts = np.searchsorted(pairs, np.arange(count + 1, dtype=np.int64) * count)
    others, degrees = pairs % count, np.diff(starts)
    while degrees.any():
        best = int(np.argmax(degrees))
        added[best] = True
        degrees[others[starts[best] : starts[best + 1]]] -= 1
        # Colors that were added have no uncovered pair left.
        degrees[added] = 0
    return added
