"""Directions that each element of a value depends on: index sets in slots, of NumPy integers that are made once.

In networks that act on particles, graphs or points one by one, a coefficient is zero along most directions. Instead of
all R directions it holds K slots, and a support gives the direction of each slot for each element.
"""

from __future__ import annotations

import math
import weakref
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hodiff.taylor.sparsity.remembering import remembered
from hodiff.torch_internals.compilers.tracing import for_later_calls

Indices = NDArray[np.int64]

# Above this share of all directions, slots save less than sorting them costs.
DENSE = 0.5


class Support:
    """The directions of the slots of a coefficient.

    Equal supports are one object, so that derived results are computed once.

    Args:
        index: Directions by slot and element, (K, *s), where s broadcasts to the shape of the value, with size 1
            along dimensions where directions do not change; -1 for a slot that is zero there. No direction occurs in
            two slots of an element.
        directions: Number of all directions, R.
    """

    def __init__(self, index: Indices, directions: int):
        self.index = index
        self.directions = directions
        self.slots = len(index)
        # Includes the places among all directions.
        self.nbytes = 2 * index.nbytes

    @property
    def ndim(self) -> int:
        """The rank of the value."""
        return self.index.ndim - 1

    @cached_property
    def varies(self) -> NDArray[np.bool_]:
        """Whether the direction of a slot changes along a dimension of the value, (K, rank); -1 agrees with any."""
        found = np.zeros((self.slots, self.ndim), dtype=bool)
        for axis in range(self.ndim):
            if self.index.shape[axis + 1] > 1:
                found[:, axis] = changes(self.index, axis + 1).reshape(self.slots, -1).any(1)
        return found

    def dense(self, coefficient: Any) -> Any:
        """Coefficient with all directions in their order."""
        return None if coefficient is None else self.all_places(coefficient)

    @cached_property
    def all_places(self) -> Places:
        """The places of the slots among all directions."""
        # An empty slot is zero, and is added to the first direction.
        return Places(np.maximum(self.index, 0), self.directions)

    def aligned(self, rank: int) -> Indices:
        """Index for values that have more dimensions, on the left."""
        missing = rank - self.ndim
        return self.index.reshape(self.slots, *[1] * missing, *self.index.shape[1:])


def kept(array: Indices, device: torch.device) -> torch.Tensor:
    """Convert an array to a tensor that belongs to no call."""
    with for_later_calls():
        return torch.tensor(array, device=device)


class Places:
    """New slots of the slots of a coefficient.

    Args:
        target: New slots by old slot and element, (K, *s), where s broadcasts to the shape of the value.
        slots: Number of new slots.
    """

    def __init__(self, target: Indices, slots: int):
        for axis in range(1, target.ndim):
            if target.shape[axis] > 1 and (target == target.take([0], axis)).all():
                target = target.take([0], axis)
        self.target = np.ascontiguousarray(target)
        self.slots = slots
        # Includes a tensor of the targets.
        self.nbytes = 2 * self.target.nbytes
        self.same_everywhere = target.size == len(target)
        once = self.same_everywhere and slots == len(target) and len(set(target.ravel().tolist())) == slots
        # If slots only change their order, the old slot for each new slot.
        self.order = np.argsort(target.ravel()) if once else None
        self.stay = once and bool((target.ravel() == np.arange(slots)).all())
        self._tensors: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __call__(self, coefficient: Any) -> Any:
        """Move a coefficient to its new slots; slots that coincide are added."""
        return coefficient if self.stay else self.onto(None, coefficient)

    def onto(self, total: Any, coefficient: Any) -> Any:
        """Add a coefficient in its new slots to a total, in place; None is zero."""
        if total is None:
            if self.order is not None:
                return coefficient.index_select(0, self.tensor("order", coefficient.device))
            total = coefficient.new_zeros((self.slots, *coefficient.shape[1:]))
        if self.same_everywhere:
            return total.index_add_(0, self.tensor("target", coefficient.device).reshape(-1), coefficient)
        return total.scatter_add_(0, self.full(coefficient.shape, coefficient.device), coefficient)

    def full(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Expand the targets to a coefficient's shape, as `scatter_add` and `gather` need."""
        target = self.tensor("target", device)
        rank = len(shape) - 1
        target = target.reshape(len(target), *[1] * (rank - target.ndim + 1), *target.shape[1:])
        return target.expand(shape)

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the order or the targets as a tensor on a device."""
        found = self._tensors.get((name, device))
        if found is None:
            found = self._tensors[name, device] = kept(getattr(self, name), device)
        return found

    @remembered
    def rows(self, axes: tuple[int, ...]) -> Places:
        """Merge the axis of slots and the given axes into one axis of slots."""
        kept = [a for a in range(1, self.target.ndim) if a not in axes]
        moved = self.target.transpose(0, *axes, *kept)
        return Places(moved.reshape(-1, *moved.shape[1 + len(axes) :]), self.slots)


def changes(index: Indices, axis: int) -> NDArray[np.bool_]:
    """Whether directions differ along an axis, where -1 agrees with any."""
    largest = index.max(axis)
    smallest = np.where(index < 0, np.iinfo(index.dtype).max, index).min(axis)
    return (largest >= 0) & (largest != smallest)


_KNOWN: weakref.WeakValueDictionary[Any, Support] = weakref.WeakValueDictionary()


def support(index: Indices, directions: int) -> Support:
    """Return the support of an index, in its smallest form."""
    for axis in range(1, index.ndim):
        if index.shape[axis] > 1 and (index == index.take([0], axis)).all():
            index = index.take([0], axis)
    index = np.ascontiguousarray(index, dtype=np.int64)
    key = (index.shape, index.tobytes(), directions)
    found = _KNOWN.get(key)
    if found is None:
        # If two threads create the support at once, both use the first one.
        found = _KNOWN.setdefault(key, Support(index, directions))
    return found


@remembered
def united(supports: tuple[Support, ...], rank: int) -> tuple[Support, tuple[Places, ...]] | None:
    """Support of an elementwise result of values with these supports.

    Returns:
        The support and the places of each argument's slots; None if it is dense.
    """
    indices = [each.aligned(rank) for each in supports]
    shape = np.broadcast_shapes(*(each.shape[1:] for each in indices))
    rows = np.concatenate([np.broadcast_to(each, (len(each), *shape)) for each in indices])
    merged = merged_rows(rows.reshape(len(rows), -1), _limit(supports[0].directions))
    if merged is None:
        return None
    index, targets = merged
    bounds = np.cumsum([each.slots for each in supports])[:-1]
    found = support(index.reshape(-1, *shape), supports[0].directions)
    return found, tuple(Places(part.reshape(-1, *shape), found.slots) for part in np.split(targets, bounds))


@remembered
def levelled(given: Support, dims: tuple[int, ...]) -> tuple[Support, Places] | None:
    """Support with equal directions along some dimensions, and the places of the slots; None if it is dense."""
    rows, places = level_rows(given, dims)
    rest = rows.shape[1:]
    merged = merged_rows(rows.reshape(len(rows), -1), _limit(given.directions))
    if merged is None:
        return None
    index, targets = merged
    # Along the dimensions each slot had its own rows, (slot, place).
    by_place = targets.reshape(len(rows), *rest)[places]
    sizes = [given.index.shape[d + 1] for d in dims]
    by_place = by_place.reshape(given.slots, *sizes, *rest)
    kept = [d for d in range(given.ndim) if d not in dims]
    order = [0, *((1 + dims.index(d)) if d in dims else 1 + len(dims) + kept.index(d) for d in range(given.ndim))]
    own = [1 if d in dims else rest[kept.index(d)] for d in range(given.ndim)]
    found = support(index.reshape(-1, *own), given.directions)
    return found, Places(by_place.transpose(order), found.slots)


def level_rows(given: Support, dims: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Directions by row and the other dimensions; a slot has one row, or one for each place if these differ.

    Returns:
        The rows, and the row of each slot and place, (K, places).
    """
    index = given.index
    kept_dims = [d for d in range(given.ndim) if d not in dims]
    places = math.prod(index.shape[d + 1] for d in dims)
    rest = [index.shape[d + 1] for d in kept_dims]
    apart = index.transpose(0, *(d + 1 for d in dims), *(d + 1 for d in kept_dims)).reshape(len(index), places, *rest)
    # -1 agrees with any direction, so rows that agree along each dimension may differ along all of them.
    varying: Any = changes(apart, 1).reshape(len(index), -1).any(1)
    blocks = [own if differs else own.max(0, keepdims=True) for own, differs in zip(apart, varying, strict=True)]
    starts = np.cumsum([0, *map(len, blocks)])[:-1]
    return np.concatenate(blocks), starts[:, None] + varying[:, None] * np.arange(places)


def _limit(directions: int) -> int:
    return max(1, int(DENSE * directions))


def merged_rows(rows: Indices, limit: int) -> tuple[Indices, Indices] | None:
    """Merge rows (n, P) of directions that agree, so that no direction occurs twice at a place."""
    # Return the result, and the row of it that each row goes to, by place, (n, P); None beyond the limit.
    distinct, first, goes = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    # Keep the order of first occurrence.
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    distinct, goes = distinct[order], rank[goes.reshape(-1)]
    holes: Any = (distinct < 0).any(1)
    if len(distinct) - holes.sum() > limit:
        return None
    if holes.any():
        distinct, filled = _without_holes(distinct)
        goes = filled[goes]
    if len(distinct) > limit:
        return None
    return _once(distinct, rows, goes)


def _without_holes(rows: Indices) -> tuple[Indices, Indices]:
    """Merge rows that agree apart from entries of -1; return the rows and the new row of each old row."""
    table = np.empty_like(rows)
    goes = np.zeros(len(rows), dtype=np.int64)
    count = 0
    for i, row in enumerate(rows):
        known = table[:count]
        agrees = ((known == row) | (known < 0) | (row < 0)).all(1)
        at = int(agrees.argmax()) if agrees.any() else count
        table[at] = row if at == count else np.maximum(table[at], row)
        count = max(count, at + 1)
        goes[i] = at
    return table[:count], goes


def _once(table: Indices, rows: Indices, goes: Indices) -> tuple[Indices, Indices]:
    """Move a direction that occurs in two rows at a place to the first row."""
    targets = np.repeat(goes[:, None], rows.shape[1], 1)
    ordered = np.sort(table, axis=0)
    if not ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any():
        return table, targets
    for later in range(1, len(table)):
        twice = (table[:later] == table[later]) & (table[later] >= 0)
        if twice.any():
            doubled = twice.any(0)
            first = twice.argmax(0)
            table[later, doubled] = -1
            of_later = (goes == later)[:, None] & doubled & (rows >= 0)
            targets = np.where(of_later, first, targets)
    # Drop rows that lost all their directions; elements that still point to them are zero.
    kept_rows: Any = (table >= 0).any(1)
    kept_rows[0] = True
    return table[kept_rows], np.where(kept_rows, np.cumsum(kept_rows) - 1, 0)[targets]
