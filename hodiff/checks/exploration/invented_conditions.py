"""Conditions that exploration tries, and the changes of the inputs that produce them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.mutations.changes import CHANGES, Change, cut, set_element, value_change
from hodiff.checks.mutations.sample import Sample

# Text of a condition, with a placeholder for the input, and the change that produces it.
Condition = tuple[str, Change]

# One more than a common block or vector size of kernels.
_LONG = 33
# Largest number of sizes of an argument that are changed, one at a time.
_SIZES = 4


def _element(value: float) -> Change:
    """Return a change that sets one element to a value."""
    return value_change(lambda x, draw: set_element(x, draw.randrange(x.numel()), value))


def _other_parity(sample: Sample, place: int, draw: random.Random) -> Sample | None:
    """Shorten a size by one, in all arguments."""
    sizes = [n for n in _shape(sample, place) if n > 2]
    return cut(sample, sizes[0], sizes[0] - 1) if sizes and place == sample.places[0] else None


def _longer(sample: Sample, old: int) -> Sample:
    """Repeat rows until a size is `_LONG`, in all arguments."""
    index = torch.arange(_LONG) % old

    def grown(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            return leaf
        for dim in (dim for dim, n in enumerate(leaf.shape) if n == old):
            leaf = leaf.index_select(dim, index.to(leaf.device))
        return leaf

    return replace(sample, leaves=tuple(map(grown, sample.leaves)))


def _with_each_size(
    words: str, change: Callable[[Sample, int], Sample], fits: Callable[[int], bool]
) -> list[Condition]:
    """Return a condition for each size of the first floating argument: a change of that size in all arguments."""

    def of(number: int) -> Change:
        def apply(sample: Sample, place: int, draw: random.Random) -> Sample | None:
            sizes = [n for n in dict.fromkeys(_shape(sample, place)) if fits(n)]
            return change(sample, sizes[number]) if number < len(sizes) and place == sample.places[0] else None

        return apply

    return [(words, of(number)) for number in range(_SIZES)]


def _broadcast(number: int) -> Change:
    """Return a change that narrows one dimension of one argument to size 1."""

    def apply(sample: Sample, place: int, draw: random.Random) -> Sample | None:
        x = sample.leaves[place]
        dims = [dim for dim, n in enumerate(_shape(sample, place)) if n > 1]
        if number >= len(dims):
            return None
        leaves = [x.narrow(dims[number], 0, 1).clone() if i == place else leaf for i, leaf in enumerate(sample.leaves)]
        return replace(sample, leaves=tuple(leaves))

    return apply


def _without_dimensions(sample: Sample, place: int, draw: random.Random) -> Sample | None:
    """Take the first element of each floating argument."""
    if place != sample.places[0] or not any(sample.leaves[i].dim() for i in sample.places):
        return None
    leaves = [x.flatten()[0].clone() if i in sample.places else x for i, x in enumerate(sample.leaves)]
    return replace(sample, leaves=tuple(leaves))


def _in(dtype: torch.dtype) -> Change:
    """Return a change that converts all floating arguments to a dtype."""

    def apply(sample: Sample, place: int, draw: random.Random) -> Sample | None:
        if place != sample.places[0] or any(sample.leaves[i].dtype == dtype for i in sample.places):
            return None
        leaves = [x.to(dtype) if i in sample.places else x for i, x in enumerate(sample.leaves)]
        return replace(sample, leaves=tuple(leaves))

    return apply


def _shape(sample: Sample, place: int) -> tuple[int, ...]:
    leaf = sample.leaves[place]
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else ()


CONDITIONS: tuple[Condition, ...] = (
    ("where an element of {} is 0", CHANGES["a zero"]),
    ("where {} is 0", CHANGES["zeros"]),
    ("where two elements of {} are equal", CHANGES["a tie"]),
    ("where all elements of {} are equal", CHANGES["constant"]),
    ("where an element of {} is 12", _element(12.0)),
    ("where an element of {} is -12", _element(-12.0)),
    ("where {} has the other sign", CHANGES["negative"]),
    ("where a size is less by one", _other_parity),
    *_with_each_size("where a size is 1", lambda sample, size: cut(sample, size, 1), lambda n: n > 1),
    *_with_each_size(f"where a size is {_LONG}", _longer, lambda n: 1 < n < _LONG),
    *(("where {} is broadcast", _broadcast(number)) for number in range(_SIZES)),
    ("where inputs have no dimensions", _without_dimensions),
    ("where {} is transposed in memory", CHANGES["transposed"]),
    ("where {} is every second number in memory", CHANGES["sliced"]),
    ("where {} is channels-last in memory", CHANGES["channels last"]),
    ("where {} is expanded", CHANGES["expanded"]),
    ("in float32", _in(torch.float32)),
    ("in bfloat16", _in(torch.bfloat16)),
)


def _first_dimension(size: int) -> Change:
    """Return a change of the number of rows, in all arguments that share it; in a module, rows are the batch."""

    def apply(sample: Sample, place: int, draw: random.Random) -> Sample | None:
        rows = [leaf.shape[0] for leaf in sample.leaves if isinstance(leaf, Tensor) and leaf.dim()]
        if place != sample.places[0] or not rows or not rows[0]:
            return None

        def taken(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.shape[:1] != (rows[0],):
                return leaf
            return leaf.index_select(0, (torch.arange(size) % rows[0]).to(leaf.device))

        return replace(sample, leaves=tuple(map(taken, sample.leaves)))

    return apply


_OF_FUNCTIONS = ("where a size ", "where inputs have no dimensions", "where {} is broadcast")
# Conditions for modules, whose feature sizes are fixed.
MODULE_CONDITIONS: tuple[Condition, ...] = (
    ("where the first dimension is 1", _first_dimension(1)),
    (f"where the first dimension is {_LONG}", _first_dimension(_LONG)),
    *((words, change) for words, change in CONDITIONS if not words.startswith(_OF_FUNCTIONS)),
)


def invented(sample: Sample, seed: int, conditions: Sequence[Condition] = CONDITIONS) -> list[tuple[str, Sample]]:
    """Return all changed inputs, with their conditions."""
    draw = random.Random(seed)
    found: list[tuple[str, Sample]] = []
    for words, change in conditions:
        for number, place in enumerate(sample.places):
            changed = change(sample, place, draw)
            # Shortening a size in all arguments may equal broadcasting one of them.
            if changed is not None and not any(_same(changed, each) for each in (sample, *(s for _, s in found))):
                found.append((words.format(f"input {number}"), changed))
    return found


def _same(a: Sample, b: Sample) -> bool:
    """Whether the change has no effect, such as a zero set to zero or a view of a single number."""
    if a.layouts != b.layouts:
        return False
    return all(
        x.dtype == y.dtype and x.shape == y.shape and bool(torch.equal(x, y)) if isinstance(x, Tensor) else x is y
        for x, y in zip(a.leaves, b.leaves, strict=True)
    )
