"""The batches that an operator sums over: their sizes, their weights, and whether they are the same on every pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.common.trees import PyTree, describe, tensors_in
from hodiff.errors import InputError

REDUCTIONS = ("mean", "sum")
Fingerprint = tuple[tuple[torch.Size, float], ...]


@dataclass(frozen=True)
class Size:
    r"""The size of a batch, or of several.

    A matrix of mean losses is $A / D$, with A the sum over examples. A matrix of products of two gradients of mean
    losses is $M A / D^2$, which is the first one for M = D.

    Attributes:
        divisor: The number D by which the loss divides.
        factors: The number M of factors.
    """

    divisor: float = 0.0
    factors: float = 0.0

    def __add__(self, other: Size) -> Size:
        return Size(self.divisor + other.divisor, self.factors + other.factors)

    @property
    def weight(self) -> float:
        """The factor $D^2 / M$ between the matrix and the sum over examples."""
        # The quotient comes first: it is exactly 1 where both numbers are equal.
        return self.divisor / self.factors * self.divisor


@dataclass(frozen=True)
class Batch:
    """One batch, with its place in the data."""

    index: int
    content: PyTree
    size: Size


class Batches:
    """Iterates over an operator's data: the same batches in the same order each time, or says what changed.

    Args:
        caller: The operator, for error messages.
        data: An iterable of batches that can be iterated again, or None for none.
        reduction: "mean" or "sum": what the function does over a batch.
        batch_size: Tells how many examples a batch holds; by default `known_size`, or the first tensor's length.
        progress: Whether passes show a progress bar.
    """

    def __init__(
        self,
        caller: str,
        data: Iterable[PyTree] | None,
        reduction: str,
        batch_size: Callable[[PyTree], int] | None,
        progress: bool,
    ):
        self.caller = caller
        self.data = data
        self.reduction = reduction
        self.progress = progress
        self._batch_size = batch_size
        # Whether the user says by what the means over batches are divided.
        self.told = batch_size is not None and data is not None and reduction == "mean"
        # Where nobody was told, what an operator knows of its loss; None for examples.
        self.known_size: Callable[[PyTree], float | None] | None = None
        # Of a pass that came to its end.
        self._known: list[Fingerprint] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield every batch; divisors of a pass add up to the number of examples, or of batches for "sum"."""
        if self.data is None:
            yield Batch(0, None, Size(1.0, 1.0))
            return
        # Each pass keeps its own count, as several threads may be at theirs.
        known, seen = self._known, list[Fingerprint]()
        # A DataLoader says how long it is, a generator function does not.
        length = len(self.data) if isinstance(self.data, Sized) else None
        # Not tqdm(self.data), which asks for two iterators a pass: a DataLoader would start its workers twice.
        with tqdm(total=length, unit=" batches", leave=False, disable=not self.progress) as bar:
            for index, content in enumerate(self.data):
                seen.append(fingerprint(content))
                if known is not None:
                    self._compare(index, seen[index], known)
                yield Batch(index, content, self._size(content))
                bar.update()
        if known is not None and len(seen) != len(known):
            raise self._changed(f"{len(seen)} batches now, {len(known)} on the first pass")
        if known is None and self._known not in (None, seen):
            raise self._changed("others in one thread than in another")
        self._known = seen

    def over(self, data: Iterable[PyTree] | None) -> Batches:
        """The same of other data."""
        other = copy.copy(self)
        other.data = data
        other.restart()
        return other

    def restart(self) -> None:
        """Take the next pass for the first."""
        self._known = None

    def empty(self) -> InputError:
        """What to raise where no rank has a batch."""
        return InputError(f"{self.caller}: data: expected at least one batch, got none; check the DataLoader.")

    def with_factors(self, size: Size, factors: float | None) -> Size:
        """The size of a batch with another number of factors than its divisor, unless that is None."""
        if factors is None or self.data is None or self.reduction == "sum":
            return size
        return Size(size.divisor, self._positive(factors))

    def _size(self, content: PyTree) -> Size:
        size = 1.0 if self.reduction == "sum" else self._positive(self._divisor(content))
        return Size(size, size)

    def _positive(self, size: float) -> float:
        size = float(size)
        if not 0 < size < math.inf:
            raise InputError(
                f"{self.caller}: batch_size: expected a positive number of examples for each batch, got {size:g}; "
                "leave empty batches out."
            )
        return size

    def _compare(self, index: int, mark: Fingerprint, known: list[Fingerprint]) -> None:
        if index >= len(known):
            raise self._changed(f"more than the {len(known)} batches of the first pass")
        if mark != known[index]:
            how = (
                "the same examples come in another order" if mark in known else "it has other examples or other values"
            )
            raise self._changed(f"another batch {index} than on the first pass: {how}")

    def _changed(self, detail: str) -> InputError:
        return InputError(
            f"{self.caller}: data: expected the same batches on every pass, got {detail}; every product would belong "
            "to another matrix. Turn shuffling and random augmentation off (DataLoader(..., shuffle=False)), or pass "
            "list(data)."
        )

    def _divisor(self, content: PyTree) -> float:
        if self._batch_size is not None:
            return self._batch_size(content)
        known = None if self.known_size is None else self.known_size(content)
        return self._first_length(content) if known is None else known

    def _first_length(self, content: PyTree) -> int:
        for tensor in tensors_in(content):
            if tensor.dim() > 0:
                return tensor.shape[0]
        raise InputError(
            f"{self.caller}: data: expected batches with a tensor whose first dimension counts examples, "
            f"got {type(content).__name__} without one; pass batch_size=lambda batch: ..., or reduction='sum'."
        )


def require_reduction(caller: str, argument: str, value: Any) -> None:
    """Refuse another reduction than those of torch's losses."""
    if value not in REDUCTIONS:
        raise InputError(
            f"{caller}: {argument}: expected one of {', '.join(map(repr, REDUCTIONS))}, got {value!r}; "
            "say what the function does over the examples of a batch."
        )


def require_data(caller: str, argument: str, value: Any) -> None:
    """Refuse what cannot be walked once a product."""
    if value is not None and not isinstance(value, Iterable):
        raise InputError(
            f"{caller}: {argument}: expected an iterable of batches, got {describe(value)}; "
            "pass a list or a DataLoader."
        )
    if isinstance(value, Iterator):
        raise InputError(
            f"{caller}: {argument}: expected an iterable that can be walked once a product, got the iterator "
            f"{type(value).__name__}, which is used up after one; pass list(data)."
        )


def require_batch_size(caller: str, argument: str, value: Any) -> None:
    """Refuse what does not tell the size of any batch."""
    if value is not None and not callable(value):
        raise InputError(
            f"{caller}: {argument}: expected a function of a batch or None, got {describe(value)}; "
            "pass batch_size=lambda batch: ..., which tells how many examples it holds."
        )


def fingerprint(content: PyTree) -> Fingerprint:
    """Shapes and sums of a batch's tensors, by which it is recognised."""
    return tuple((tensor.shape, _sum(tensor)) for tensor in tensors_in(content))


def _sum(tensor: Tensor) -> float:
    # Weights that grow along the tensor tell a batch from the same examples in another order.
    if tensor.layout != torch.strided:
        tensor = (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # NaN marks missing numbers, and would differ from itself.
    flat = tensor.detach().reshape(-1).double().nan_to_num(nan=-1.0, posinf=2.0, neginf=-2.0)
    if flat.is_meta:
        return 0.0
    return float(flat @ torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device))
