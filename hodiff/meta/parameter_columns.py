"""Conversion of lists of tensors, one for each leaf of the parameters, to columns for linear solvers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hodiff.estimators.precision import norms_of
from hodiff.estimators.systems.conjugate_gradients import conjugate_gradients

Vector = list[Tensor]


class Columns:
    """Conversion between lists of leaves (k, *shape), or (*shape) for k = 1, and columns (n, k)."""

    def __init__(self, leaves: Sequence[Tensor], count: int):
        self._count = count
        self._shapes = [each.shape for each in leaves]
        self._sizes = [each.numel() // count for each in leaves]
        self._dtypes = [each.dtype for each in leaves]
        self._mixed = len(set(self._dtypes)) > 1

    def join(self, leaves: Sequence[Tensor]) -> Tensor:
        """Join leaves to columns."""
        rows = [each.reshape(self._count, -1) for each in leaves]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).T

    def split(self, columns: Tensor) -> Vector:
        """Split columns into leaves."""
        parts = columns.T.split(self._sizes, 1)
        leaves = [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        if not self._mixed:
            return leaves
        return [leaf.to(dtype) for leaf, dtype in zip(leaves, self._dtypes, strict=True)]


def solve_tasks(
    product: Callable[[Vector], Sequence[Tensor]], b: Sequence[Tensor], *, steps: int, tolerance: float
) -> tuple[Vector, Tensor]:
    """Solve a symmetric positive definite system for each task by conjugate gradients.

    Args:
        product: Multiplies vectors of all tasks, leaves (tasks, *shape), by the tasks' matrices.
        b: Right-hand sides.
        steps: Maximum number of products.
        tolerance: Relative residual at which a system is solved.

    Returns:
        Solutions, and their relative residuals (tasks,).
    """
    count = len(b[0])
    layout = Columns(b, count)
    right = layout.join(b)

    def of_open(block: Tensor, open_tasks: Tensor) -> Tensor:
        if len(open_tasks) == count:
            return layout.join(product(layout.split(block)))
        # The product takes all tasks at once; solved tasks get zeros.
        filled = torch.zeros_like(right).index_copy(1, open_tasks, block)
        return layout.join(product(layout.split(filled)))[:, open_tasks]

    sizes = norms_of(right)
    found = conjugate_gradients(of_open, right, tolerance * sizes, steps)
    return layout.split(found.solution), torch.where(sizes > 0, found.norms / sizes, found.norms)
