"""Linear systems of many tasks at once, whose vectors are lists of tensors, one for each leaf of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hodiff.estimators.conjugate_gradients import conjugate_gradients
from hodiff.estimators.precision import norms_of
from hodiff.operators.spaces import Space

Vector = list[Tensor]


def solve_tasks(
    product: Callable[[Vector], Sequence[Tensor]], b: Sequence[Tensor], *, steps: int, tolerance: float
) -> tuple[Vector, Tensor]:
    """Solve a symmetric positive definite system for each task by conjugate gradients.

    Args:
        product: Multiplies vectors of all tasks, leaves (tasks, *shape), by the tasks' matrices.
        b: Right-hand sides.
        steps: Most products.
        tolerance: Relative residual to stop at.

    Returns:
        Solutions, and their relative residuals (tasks,).
    """
    count = len(b[0])
    space = Space.of([each[0] for each in b])
    right = space.join(b, count)

    def of_open(block: Tensor, open_tasks: Tensor) -> Tensor:
        if len(open_tasks) == count:
            return space.join(product(list(space.split(block))), count)
        # The product takes all tasks or none; those that are solved are given zeros.
        filled = torch.zeros_like(right).index_copy(1, open_tasks, block)
        return space.join(product(list(space.split(filled))), count)[:, open_tasks]

    sizes = norms_of(right)
    found = conjugate_gradients(of_open, right, tolerance * sizes, steps)
    return list(space.split(found.solution)), torch.where(sizes > 0, found.norms / sizes, found.norms)
