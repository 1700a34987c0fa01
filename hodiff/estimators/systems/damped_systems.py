"""Linear systems for all solvers, and refinement by increments until the tolerance is met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hodiff.estimators.checkpoints import Stages
from hodiff.estimators.view import View

Apply = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class DampedSystem:
    r"""Damped system $(A + \lambda I) X = B$ for the columns of B."""

    view: View
    damping: float
    precondition: Apply | None
    max_iterations: int
    callback: Callable[[int, Tensor], None] | None
    restart: int | None
    step_size: float | None
    stages: Stages
    iterations: int = 0
    increments: int = 0
    offset: int = field(default=0, repr=False)

    def apply(self, block: Tensor) -> Tensor:
        """Multiply with the damped operator."""
        image = self.view.matmat(block)
        return image + self.damping * block if self.damping else image

    def apply_transposed(self, block: Tensor) -> Tensor | None:
        """Multiply with the damped transpose; None if there is no transpose."""
        image = self.view.rmatmat(block)
        return image + self.damping * block if self.damping and image is not None else image

    @property
    def left(self) -> int:
        """Number of remaining iterations."""
        return self.max_iterations - self.offset

    def advance_to(self, iteration: int) -> None:
        """Count an iteration within the current increment; columns that are solved one by one share the count."""
        self.iterations = max(self.iterations, self.offset + iteration)

    def advance(self, iteration: int, norms: Tensor) -> None:
        """Count an iteration and report it."""
        self.advance_to(iteration)
        self.report(norms)

    def report(self, norms: Tensor) -> None:
        """Call the user's callback with the current norms of residuals."""
        if self.callback is not None:
            self.callback(self.iterations, norms)


@dataclass(eq=False)
class Increment:
    """Approximate solution for given residuals, with the reason why a column cannot be improved further."""

    step: Tensor
    reasons: list[str | None]


# Solver that computes an increment for the columns of residuals, reduced to their target norms.
Solver = Callable[[DampedSystem, Tensor, Tensor], Increment]
# Norms of residuals that must meet the targets.
Measure = Callable[[DampedSystem, Tensor], Tensor]


@dataclass(eq=False)
class Outcome:
    """Result of a solver: solution, true residual, and for each unsolved column the reason."""

    solution: Tensor
    residual: Tensor
    reasons: list[str | None]


def refine(
    system: DampedSystem, b: Tensor, x: Tensor | None, targets: Tensor, solver: Solver, measure: Measure
) -> Outcome:
    """Solve for the true residual until it meets the target or an increment brings little.

    The recursive residual of an algorithm drifts from the true one by rounding, and is never reported.

    Args:
        system: System to solve.
        b: Right-hand sides, (m, k).
        x: Start, (n, k); zeros by default.
        targets: Upper limits of the measure of each column.
        solver: Algorithm for the increments.
        measure: Norms of residuals.

    Returns:
        Solution, true residual and reasons.
    """
    solution = torch.zeros(system.view.n, b.shape[1], dtype=b.dtype, device=b.device) if x is None else x.clone()
    residual = b.clone() if x is None else b - system.apply(x)
    sizes = measure(system, residual)
    reasons: list[str | None] = [None] * b.shape[1]
    open_columns = torch.nonzero(sizes > targets).flatten().tolist()
    while open_columns:
        system.offset = system.iterations
        increment = solver(system, residual[:, open_columns], targets[open_columns])
        trial = solution[:, open_columns] + increment.step
        left = b[:, open_columns] - system.apply(trial)
        after = measure(system, left)
        remaining = []
        for index, column in enumerate(open_columns):
            before = sizes[column].item()
            # A step that increased the residual is dropped, unless CG broke down on an indefinite operator.
            if after[index] < before or increment.reasons[index] is not None:
                solution[:, column], residual[:, column] = trial[:, index], left[:, index]
                sizes[column] = after[index]
            if sizes[column] <= targets[column]:
                reasons[column] = None
            elif increment.reasons[index] is not None:
                reasons[column] = increment.reasons[index]
            elif system.iterations >= system.max_iterations:
                reasons[column] = (
                    f"reached max_iterations={system.max_iterations}; raise it, tol or damping, or precondition"
                )
            elif after[index] > before / 2:
                cause = "" if system.precondition is None else ", or of a singular preconditioner"
                reasons[column] = (
                    f"stagnated at the rounding of the operator{cause}; raise tol or damping, or use float64"
                )
            else:
                remaining.append(column)
        system.report(sizes)
        open_columns = remaining
    return Outcome(solution, residual, reasons)
