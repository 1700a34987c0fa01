"""Supports: sets of inputs that the elements of a tensor depend on, and the set of each element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack

Indices = np.ndarray[Any, np.dtype[np.int64]]


# Maximum number of entries in all sets of one tensor: more would take gigabytes, and dense patterns are not worth the
# search.
MOST_ENTRIES = 2**25
MOST_OF_EACH = 128


def most_entries(inputs: int) -> int:
    """Maximum number of entries in the sets of one tensor."""
    return max(MOST_ENTRIES, MOST_OF_EACH * inputs)


class TooManyError(Exception):
    """Raised when sets have more entries than allowed."""


@dataclass(frozen=True)
class Supports:
    """Sets of inputs that a tensor's elements depend on; elements that share a set share its number.

    Attributes:
        which: The number of each element's set, in the tensor's shape.
        sets: A row for each set, a column for each input, boolean. The first is empty.
    """

    which: Indices
    sets: csr_array

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.which.shape

    @property
    def is_empty(self) -> bool:
        """Whether no element depends on anything."""
        return not self.which.any()

    def take(self, which: Indices) -> Supports:
        """The same sets at other elements."""
        return Supports(which, self.sets)

    def reshape(self, *shape: int) -> Supports:
        """The same elements in another shape."""
        return self.take(self.which.reshape(shape))

    def broadcast(self, shape: Sequence[int]) -> Supports:
        """Repeat elements as torch broadcasts them."""
        return self.take(np.broadcast_to(self.which, tuple(shape)))

    def rows(self) -> csr_array:
        """Return a row for each element; raises `TooManyError`."""
        _require_few(self.sets, self.which.reshape(-1))
        return self.sets[self.which.reshape(-1)]

    def merged(self, groups: Indices, shape: Sequence[int]) -> Supports:
        """Union of the elements of each group, given the flat position in the result of each, after broadcasting."""
        which = np.broadcast_to(self.which, groups.shape).reshape(-1)
        members = which > 0
        count = int(np.prod(shape))
        if not members.any():
            return empty(shape, self.sets.shape[1])
        groups, which = groups.reshape(-1)[members], which[members]
        found, numbers = np.unique(groups, return_inverse=True)
        ones = np.ones(len(which), dtype=bool)
        _require_few(self.sets, which)
        members_of = csr_array((ones, (numbers, which)), shape=(len(found), self.sets.shape[0]))
        placed = np.zeros(count, dtype=np.int64)
        placed[found] = np.arange(1, len(found) + 1)
        return Supports(placed.reshape(tuple(shape)), _with_empty(members_of @ self.sets))

    def over(self, dims: Sequence[int], *, keepdim: bool = False) -> Supports:
        """Union over dimensions."""
        rank = self.which.ndim
        dims = sorted({dim % rank for dim in dims}) if rank else []
        kept = [dim for dim in range(rank) if dim not in dims]
        shape = tuple(self.shape[dim] for dim in kept)
        numbers = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        merged = self.merged(np.broadcast_to(np.expand_dims(numbers, tuple(dims)), self.shape), shape)
        return merged.take(np.expand_dims(merged.which, tuple(dims))) if keepdim else merged

    def along(self, dims: Sequence[int]) -> Supports:
        """Union over dimensions, repeated for every element."""
        return self.over(dims, keepdim=True).broadcast(self.shape)

    def whole(self, shape: Sequence[int]) -> Supports:
        """Union of all elements, for every element of a shape."""
        return self.reshape(-1).over((0,)).broadcast(shape)

    def only(self, kept: np.ndarray[Any, np.dtype[np.bool_]]) -> Supports:
        """Remove the dependence where `kept` is false."""
        return self.take(np.where(kept, self.which, 0))

    def compact(self) -> Supports:
        """Drop sets that no element has, if there are many of them."""
        if self.sets.shape[0] <= 2 * self.which.size + 1:
            return self
        used, which = np.unique(np.append(0, self.which), return_inverse=True)
        return Supports(which[1:].reshape(self.shape), self.sets[used])

    def __or__(self, other: Supports) -> Supports:
        """The union, element by element; shapes broadcast."""
        shape = np.broadcast_shapes(self.shape, other.shape)
        mine, others = np.broadcast_to(self.which, shape), np.broadcast_to(other.which, shape)
        if not mine.any():
            return other.take(others)
        if not others.any() or (self.sets is other.sets and np.array_equal(mine, others)):
            return self.take(mine)
        sets = other.sets.shape[0]
        pairs = mine.astype(np.int64).reshape(-1) * sets + others.reshape(-1)
        numbers: Indices
        if 4 * max(self.sets.shape[0], sets) < len(pairs):
            pairs, numbers = np.unique(pairs, return_inverse=True)
        else:  # few elements share their sets: finding them costs more than it saves
            numbers = np.arange(len(pairs), dtype=np.int64)
        _require_few(self.sets, pairs // sets)
        _require_few(other.sets, pairs % sets)
        union = self.sets[pairs // sets] + other.sets[pairs % sets]
        return Supports(numbers.reshape(shape) + 1, _with_empty(union))


def empty(shape: Sequence[int], inputs: int) -> Supports:
    """Elements that depend on nothing."""
    return Supports(np.zeros(tuple(shape), dtype=np.int64), csr_array((1, inputs), dtype=bool))


def identity(count: int, inputs: int, start: int) -> Supports:
    """Supports of elements that are the inputs themselves, beginning with input `start`."""
    columns = np.arange(start, start + count)
    sets = csr_array((np.ones(count, dtype=bool), columns, np.arange(count + 1)), shape=(count, inputs))
    return Supports(np.arange(1, count + 1), _with_empty(sets))


def from_rows(rows: csr_array, shape: Sequence[int]) -> Supports:
    """Supports of elements with one set each, the rows in order."""
    _require_few(rows, np.arange(rows.shape[0]))
    return Supports(np.arange(1, rows.shape[0] + 1).reshape(tuple(shape)), _with_empty(rows))


def joined(parts: Sequence[Supports]) -> Supports:
    """Supports of the elements of several tensors, concatenated."""
    starts = np.cumsum([0, *(part.sets.shape[0] for part in parts)])
    which = [np.where(part.which > 0, part.which + start, 0) for part, start in zip(parts, starts, strict=False)]
    return Supports(
        np.concatenate([each.reshape(-1) for each in which]), csr_array(vstack([part.sets for part in parts]))
    )


def _require_few(sets: csr_array, chosen: Indices) -> None:
    if np.diff(sets.indptr)[chosen].sum() > most_entries(sets.shape[1]):
        raise TooManyError


def _with_empty(sets: Any) -> csr_array:
    """Put the empty set first."""
    sets = csr_array(sets)
    indptr = np.concatenate([sets.indptr[:1], sets.indptr])
    return csr_array((sets.data, sets.indices, indptr), shape=(sets.shape[0] + 1, sets.shape[1]))
