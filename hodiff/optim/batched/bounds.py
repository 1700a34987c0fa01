"""Bounds of many problems: the same for all, or a row for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.optim.batched.batch import Batch
from hodiff.optim.batched.rows import Rows
from hodiff.optim.bounds import bounds_of
from hodiff.optim.variables import Variables


@dataclass
class Box(Rows):
    """Lower and upper bounds, (b, n)."""

    lower: Tensor
    upper: Tensor

    def project(self, x: Tensor) -> Tensor:
        """The nearest point within."""
        return x.maximum(self.lower).minimum(self.upper)

    def holds(self, x: Tensor, direction: Tensor) -> Tensor:
        """Which unknowns are at a bound, and would leave it outwards."""
        return ((x <= self.lower) & (direction < 0)) | ((x >= self.upper) & (direction > 0))

    def active(self, x: Tensor) -> Tensor:
        """-1 at lower bounds, 1 at upper ones, else 0, as SciPy has it."""
        return (x >= self.upper).to(x.dtype) - (x <= self.lower).to(x.dtype)


def box_of(caller: str, bounds: Any, batch: Batch, *, in_pairs: bool = True) -> Box | None:
    """Bounds in any form of `minimize`, for one problem or with a row for each; None where there are none."""
    if bounds is None:
        return None
    sides = bounds if isinstance(bounds, tuple) and len(bounds) == 2 else (None, None)
    rows = [_rows(side, batch) for side in sides]
    # What is not given row by row is the same for all problems.
    shared: Any = bounds
    if any(row is not None for row in rows):
        shared = tuple(None if row is not None else side for row, side in zip(rows, sides, strict=True))
    found = bounds_of(caller, shared, Variables(batch.first), in_pairs=in_pairs)
    lower, upper = (
        row if row is not None else torch.as_tensor(side.copy()).to(batch.start).expand_as(batch.start)
        for row, side in zip(rows, (found.lb, found.ub), strict=True)
    )
    if bool((crossed := ~(lower <= upper)).any()):
        problem, i = map(int, crossed.nonzero()[0])
        raise InputError(
            f"{caller}: bounds: expected lower bounds that are at most the upper ones, got {lower[problem, i]:g} and "
            f"{upper[problem, i]:g} for element {i} of problem {problem}, in pytree order."
        )
    return Box(lower.contiguous(), upper.contiguous())


def _rows(side: Any, batch: Batch) -> Tensor | None:
    """One side as rows (B, n), if it is a tree like `x0`."""
    return batch.vectors(side) if batch.is_like(side) else None
