"""Bounds of many problems: equal for all problems, or a row for each problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.optim.batched.batch import Batch
from hodiff.optim.batched.running_rows import Rows
from hodiff.optim.bounds import bounds_of
from hodiff.optim.variables import Variables


@dataclass
class Box(Rows):
    """Lower and upper bounds, (b, n)."""

    lower: Tensor
    upper: Tensor

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point within the bounds."""
        return x.maximum(self.lower).minimum(self.upper)

    def holds(self, x: Tensor, direction: Tensor) -> Tensor:
        """Mark the unknowns that are at a bound and would cross it along the direction."""
        return ((x <= self.lower) & (direction < 0)) | ((x >= self.upper) & (direction > 0))

    def active(self, x: Tensor) -> Tensor:
        """Return -1 at lower bounds, 1 at upper bounds and 0 elsewhere, like SciPy's `active_mask`."""
        return (x >= self.upper).to(x.dtype) - (x <= self.lower).to(x.dtype)


def box_of(caller: str, bounds: Any, batch: Batch, *, in_pairs: bool = True) -> Box | None:
    """Convert bounds of one problem, or with a row for each, to a `Box`; None for no bounds."""
    if bounds is None:
        return None
    sides = bounds if isinstance(bounds, tuple) and len(bounds) == 2 else (None, None)
    rows = [_rows(side, batch) for side in sides]
    # A side that is not given row by row applies to all problems.
    shared: Any = bounds
    if any(row is not None for row in rows):
        shared = tuple(None if row is not None else side for row, side in zip(rows, sides, strict=True))
    found = bounds_of(caller, shared, Variables(batch.first), in_pairs=in_pairs)
    lower, upper = (
        row if row is not None else torch.as_tensor(side.copy(), device="cpu").to(batch.start).expand_as(batch.start)
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
    """Return one side as rows (B, n), or None if its structure is not that of `x0`."""
    return batch.vectors(side) if batch.is_like(side) else None
