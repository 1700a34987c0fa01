"""Linearizations of one operator, computed batch by batch and cached within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from hodiff.common.trees import tensors_in
from hodiff.operators.data.batches import Batch, Batches, Size
from hodiff.operators.data.determinism import Mark, another_function, mark_of, read_and_changed
from hodiff.operators.data.distributed import JointBatches
from hodiff.torch_internals.tensors import version_of

Leaves = tuple[Tensor, ...]


class Linearization(Protocol):
    """The part of a product that depends on the point and one batch, ready for any vector.

    It may also have a method `product(tangents)` for one vector, whose leaves have the shapes of the point's.

    Attributes:
        bytes_each: Bytes for one more vector in a product.
        nbytes: Bytes of stored intermediate results, or 0.
        value: The function's result, for comparison between passes.
    """

    bytes_each: int
    nbytes: int
    value: Leaves

    def products(self, tangents: Leaves) -> Leaves:
        """Compute products with k vectors, leaves (k, *shape)."""


class KeptLinearizations:
    """Linearizations of all batches at one point; those not cached are recomputed in each pass, and must not change."""

    def __init__(
        self,
        caller: str,
        batches: Batches,
        cache: bool | str,
        memory_budget: int,
        *,
        compare: bool,
        joint: JointBatches | None = None,
    ):
        self._joint = joint
        self._caller, self._batches, self._compare = caller, batches, compare
        self._cache, self._budget = cache, memory_budget
        self._kept: dict[int, tuple[Linearization, Size]] = {}
        self._marks: dict[int, Mark] = {}
        self._versions: list[int] | None = None
        # Number of batches, known after the first complete pass.
        self._count: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cached linearizations."""
        return sum(each.nbytes for each, _ in self._kept.values())

    @property
    def alone(self) -> Linearization | None:
        """The only linearization, which was computed already, and whose products are neither weighted nor summed."""
        if self._batches.data is not None or self._joint is not None or not self._kept:
            return None
        linearization, size = self._kept[0]
        return linearization if size.weight == 1.0 else None

    def each(self, make: Callable[[Batch], tuple[Linearization, Size]]) -> Iterator[tuple[Linearization, Size]]:
        """Yield linearizations and sizes of all batches."""
        if len(self._kept) == self._count:
            yield from self._kept.values()
            return
        count = 0
        for batch in self._batches if self._joint is None else self._joint.in_step(self._batches):
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

    def again(self, make: Callable[[Batch], tuple[Linearization, Size]]) -> Iterator[tuple[Linearization, Size]]:
        """Yield other linearizations of all batches; the model's values must be those of the cached ones."""
        for linearization, size, index in ((*make(batch), batch.index) for batch in self._batches):
            cached = self._kept.get(index)
            known = self._marks.get(index) if cached is None else mark_of(cached[0].value)
            mark = mark_of(linearization.value)
            # Compiled products have the number of their graph for a value.
            if self._compare and known is not None and mark.shapes == known.shapes and not mark.agrees(known):
                raise another_function(self._caller, index)
            yield linearization, size

    @contextmanager
    def unchanged(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Raise if tensors in the arguments were changed in place since the last linearization at them."""
        if self._versions not in (None, _versions(args)):
            raise read_and_changed(self._caller)
        yield
        self._versions = _versions(args)

    def _keeps(self, linearization: Linearization) -> bool:
        if self._batches.data is None:
            return True
        if not self._cache:
            return False
        if self._cache != "auto":
            return True
        fits = self.nbytes + linearization.nbytes <= self._budget
        # Ranks that do not keep a linearization compute it again, and all ranks must take part.
        return fits if self._joint is None else self._joint.all(fits)


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [version_of(each) for each in tensors_in(args) if not each.is_inference()]
