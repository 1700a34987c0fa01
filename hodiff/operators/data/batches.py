"""The batches that an operator sums over: their sizes, their weights, and a check that every pass has the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.common.options import require_choice
from hodiff.common.trees import PyTree, describe, tensors_in
from hodiff.errors import InputError
from hodiff.torch_internals.tensors import has_numbers

REDUCTIONS = ("mean", "sum")
Fingerprint = tuple[tuple[torch.Size, float], ...]


@dataclass(frozen=True)
class Size:
    r"""The size of a batch, or the total size of several batches.

    A matrix of mean losses is $A / D$, with A the sum over examples. A matrix of products of two gradients of mean
    losses is $M A / D^2$, which equals $A / D$ for M = D.

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
        # Divide first: the quotient is exactly 1 if both numbers are equal.
        return self.divisor / self.factors * self.divisor


@dataclass(frozen=True)
class Batch:
    """One batch, with its position among the batches that count in the loss."""

    index: int
    content: PyTree
    size: Size


class Batches:
    """Iterates over an operator's data, and raises if a pass has other batches, or another order, than the first.

    Args:
        caller: The operator, for error messages.
        data: An iterable of batches that can be iterated again, or None for none.
        reduction: "mean" or "sum": how the function reduces over a batch.
        batch_size: Returns the number of examples of a batch; by default `known_size`, or the first tensor's length.
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
        # Whether the user gave the divisors of the means over batches.
        self.told = batch_size is not None and data is not None and reduction == "mean"
        # Divisor that an operator knows from its loss, used if the user gave none; None to count examples.
        self.known_size: Callable[[PyTree], float | None] | None = None
        # Fingerprints of the first completed pass.
        self._known: list[Fingerprint] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield every batch that counts; divisors add up to the number of examples, or of batches for "sum"."""
        if self.data is None:
            yield Batch(0, None, Size(1.0, 1.0))
            return
        # Each pass counts separately, as several threads may iterate at once.
        known, seen, count = self._known, list[Fingerprint](), 0
        # A DataLoader has a length, a generator function has none.
        length = len(self.data) if isinstance(self.data, Sized) else None
        # Not tqdm(self.data), which asks for two iterators in a pass: a DataLoader would start its workers twice.
        with tqdm(total=length, unit=" batches", leave=False, disable=not self.progress) as bar:
            for index, content in enumerate(self.data):
                seen.append(fingerprint(content))
                if known is not None:
                    self._compare(index, seen[index], known)
                if not self._is_ignored(content):
                    yield Batch(count, content, self._size(content))
                    count += 1
                bar.update()
        if known is not None and len(seen) != len(known):
            raise self._changed(f"{len(seen)} batches now, {len(known)} on the first pass")
        if known is None and self._known not in (None, seen):
            raise self._changed("different batches in different threads")
        self._known = seen

    def over(self, data: Iterable[PyTree] | None) -> Batches:
        """Return batches of other data with the same settings."""
        other = copy.copy(self)
        other.data = data
        other.restart()
        return other

    def restart(self) -> None:
        """Treat the next pass as the first."""
        self._known = None

    def empty(self) -> InputError:
        """Return the error for data without a batch that counts on any rank."""
        if self._known:
            return InputError(
                f"{self.caller}: data: expected a target that counts in the loss, got batches whose targets it ignores "
                "or weights by 0; check the targets."
            )
        return InputError(f"{self.caller}: data: expected at least one batch, got none; check the DataLoader.")

    def with_factors(self, size: Size, factors: float | None) -> Size:
        """Return the size of a batch with `factors` factors, or unchanged if that is None."""
        if factors is None or self.data is None or self.reduction == "sum":
            return size
        return Size(size.divisor, self._positive(factors))

    def _is_ignored(self, content: PyTree) -> bool:
        """Whether the loss counts no target of a batch, so that the weight of the batch is 0 and its mean 0/0."""
        if self.reduction == "sum" or self._batch_size is not None or self.known_size is None:
            return False
        return self.known_size(content) == 0 and all(tensor.numel() for tensor in tensors_in(content))

    def _size(self, content: PyTree) -> Size:
        size = 1.0 if self.reduction == "sum" else self._positive(self.divisor(content))
        return Size(size, size)

    def _positive(self, size: float) -> float:
        size = float(size)
        if not 0 < size < math.inf:
            raise InputError(
                f"{self.caller}: batch_size: expected a positive number of examples for each batch, got {size:g}; "
                "remove empty batches."
            )
        return size

    def _compare(self, index: int, mark: Fingerprint, known: list[Fingerprint]) -> None:
        if index >= len(known):
            raise self._changed(f"more than the {len(known)} batches of the first pass")
        if mark != known[index]:
            how = (
                "the same examples come in another order" if mark in known else "it has other examples or other values"
            )
            raise self._changed(f"a batch {index} that differs from the first pass: {how}")

    def _changed(self, detail: str) -> InputError:
        return InputError(
            f"{self.caller}: data: expected the same batches on every pass, got {detail}; each product would be of a "
            "different matrix. Turn shuffling and random augmentation off (DataLoader(..., shuffle=False)), or pass "
            "list(data)."
        )

    def divisor(self, content: PyTree) -> float:
        """Return the number by which the mean over a batch divides."""
        if self._batch_size is not None:
            return self._batch_size(content)
        known = None if self.known_size is None else self.known_size(content)
        return self._first_length(content) if known is None else known

    def _first_length(self, content: PyTree) -> int:
        for tensor in tensors_in(content):
            if tensor.dim() > 0:
                return tensor.shape[0]
        raise InputError(
            f"{self.caller}: data: expected batches with a tensor that has examples along its first dimension, got "
            f"{type(content).__name__} without such a tensor; pass batch_size=lambda batch: ..., or reduction='sum'."
        )


def require_reduction(caller: str, value: Any) -> None:
    """Raise if a reduction is neither "mean" nor "sum"."""
    remedy = "say what the function does over the examples of a batch"
    require_choice(caller, "reduction", value, REDUCTIONS, remedy=remedy)


def require_data(caller: str, argument: str, value: Any) -> None:
    """Raise if data is not an iterable of batches that can be iterated once for each product."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, Tensor) for each in value)
    # Each of these can be iterated, but its items are no batches: rows, keys, letters, or inputs and targets.
    if is_pair or isinstance(value, (Tensor, np.ndarray, Mapping, str, bytes)):
        raise InputError(
            f"{caller}: {argument}: expected an iterable of batches, got "
            f"{'a pair of tensors' if is_pair else f'a {type(value).__name__}'}, which may be a single batch; pass "
            "[data] for one batch, or list(data) if its items are batches."
        )
    if value is not None and not isinstance(value, Iterable):
        raise InputError(
            f"{caller}: {argument}: expected an iterable of batches, got {describe(value)}; "
            "pass a list or a DataLoader."
        )
    if isinstance(value, Iterator):
        raise InputError(
            f"{caller}: {argument}: expected an iterable that every product can iterate over, got the iterator "
            f"{type(value).__name__}, which is exhausted after the first product; pass list(data)."
        )


def require_batch_size(caller: str, argument: str, value: Any) -> None:
    """Raise if `batch_size` is neither None nor callable."""
    if value is not None and not callable(value):
        raise InputError(
            f"{caller}: {argument}: expected a function of a batch or None, got {describe(value)}; "
            "pass batch_size=lambda batch: ..., which returns the number of examples."
        )


def fingerprint(content: PyTree) -> Fingerprint:
    """Compute shapes and weighted sums of a batch's tensors, to recognise the batch."""
    return tuple((tensor.shape, _sum(tensor)) for tensor in tensors_in(content))


def _sum(tensor: Tensor) -> float:
    # Weights that grow along the tensor make the sum depend on the order of the examples.
    if tensor.layout != torch.strided:
        tensor = (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # NaN marks missing numbers, but would not equal itself.
    flat = tensor.detach().reshape(-1).double().nan_to_num(nan=-1.0, posinf=2.0, neginf=-2.0)
    if not has_numbers(flat):
        return 0.0
    return float(flat @ torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device))
