"""A linear system as its solvers see it, and the increments by which each of them reaches the tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hodiff.estimators.view import View

Apply = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class DampedSystem:
    r"""$(A + \lambda I) X = B$ for the columns of B, each to be solved to its own target."""

    view: View
    damping: float
    precondition: Apply | None
    max_iterations: int
    callback: Callable[[int, Tensor], None] | None
    restart: int | None
    step_size: float | None
    iterations: int = 0
    offset: int = field(default=0, repr=False)

    def apply(self, block: Tensor) -> Tensor:
        """The damped operator."""
        image = self.view.matmat(block)
        return image + self.damping * block if self.damping else image

    def apply_transposed(self, block: Tensor) -> Tensor | None:
        """The damped transpose, None if there is no transpose."""
        image = self.view.rmatmat(block)
        return image + self.damping * block if self.damping and image is not None else image

    @property
    def left(self) -> int:
        """Iterations that may still be made."""
        return self.max_iterations - self.offset

    def advance_to(self, iteration: int) -> None:
        """Count an iteration within the current increment; columns that are solved one by one count together."""
        self.iterations = max(self.iterations, self.offset + iteration)

    def advance(self, iteration: int, norms: Tensor) -> None:
        """Count an iteration, and tell the user of it."""
        self.advance_to(iteration)
        self.report(norms)

    def report(self, norms: Tensor) -> None:
        """Tell the user's callback how large residuals are by now."""
        if self.callback is not None:
            self.callback(self.iterations, norms)


@dataclass(eq=False)
class Increment:
    """An approximate solution for given residuals, with the reason where a column cannot be brought further."""

    step: Tensor
    reasons: list[str | None]


# Gives an increment for the columns of residuals, each to be reduced to its target norm.
Solver = Callable[[DampedSystem, Tensor, Tensor], Increment]
# Norms of residuals, which must become small.
Measure = Callable[[DampedSystem, Tensor], Tensor]


@dataclass(eq=False)
class Outcome:
    """Where a solver stopped: solution, its true residual, and for each column why it is not solved."""

    solution: Tensor
    residual: Tensor
    reasons: list[str | None]


def refine(
    system: DampedSystem, b: Tensor, x: Tensor | None, targets: Tensor, solver: Solver, measure: Measure
) -> Outcome:
    """Solve for what the true residual leaves, until it meets the target or an increment brings little.

    What an algorithm takes for its residual drifts from the truth by rounding, and is reported to nobody.

    Args:
        system: The system.
        b: Right-hand sides, (m, k).
        x: Where to start, (n, k); zeros by default.
        targets: What the measure of each column must not exceed.
        solver: The algorithm.
        measure: Norms of residuals.

    Returns:
        The outcome.
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
            # A step that made things worse is not taken, except where an indefinite operator ends CG on its way.
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
                reasons[column] = "stagnated at the rounding of the operator; raise tol or damping, or use float64"
            else:
                remaining.append(column)
        system.report(sizes)
        open_columns = remaining
    return Outcome(solution, residual, reasons)
