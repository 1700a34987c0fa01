"""Linearizations of one operator: made batch by batch, kept as far as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from hodiff.operators.data.batches import Batch, Batches, Size
from hodiff.operators.data.determinism import Mark, another_function, mark_of

Leaves = tuple[Tensor, ...]


class Linearization(Protocol):
    """The part of a product that belongs to the point and one batch, ready for any vector.

    Attributes:
        bytes_each: Bytes that one more vector takes while it is multiplied.
        nbytes: Bytes that are kept, or 0 where nothing is.
        value: What the function returned, by which it is known again.
    """

    bytes_each: int
    nbytes: int
    value: Leaves

    def products(self, tangents: Leaves) -> Leaves:
        """Products with k vectors, leaves (k, *shape)."""


class KeptLinearizations:
    """Those of all batches at one point; what is not kept is made in each pass, and has to be what it was."""

    def __init__(self, caller: str, batches: Batches, cache: bool | str, memory_budget: int, *, compare: bool):
        self._caller, self._batches, self._compare = caller, batches, compare
        self._cache, self._budget = cache, memory_budget
        self._kept: dict[int, tuple[Linearization, Size]] = {}
        self._marks: dict[int, Mark] = {}
        # How many batches there are, once a pass has seen all of them.
        self._count: int | None = None

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return sum(each.nbytes for each, _ in self._kept.values())

    def each(self, make: Callable[[Batch], tuple[Linearization, Size]]) -> Iterator[tuple[Linearization, Size]]:
        """Linearizations and sizes of all batches."""
        if len(self._kept) == self._count:
            yield from self._kept.values()
            return
        count = 0
        for batch in self._batches:
            count += 1
            if batch.index in self._kept:
                yield self._kept[batch.index]
                continue
            linearization, size = make(batch)
            if self._keeps(linearization):
                self._kept[batch.index] = linearization, size
            elif self._compare:
                known = self._marks.setdefault(batch.index, mark := mark_of(linearization.value))
                if not mark.agrees(known):
                    raise another_function(self._caller, batch.index)
            yield linearization, size
        self._count = count

    def _keeps(self, linearization: Linearization) -> bool:
        if self._batches.data is None:
            return True
        if not self._cache:
            return False
        return self._cache != "auto" or self.nbytes + linearization.nbytes <= self._budget
