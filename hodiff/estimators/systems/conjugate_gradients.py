"""Preconditioned conjugate gradients for several systems at once, on the device of the right-hand sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.estimators.checkpoints import Keep, State
from hodiff.estimators.results import norms_of, precise
from hodiff.estimators.systems.damped_systems import DampedSystem, Increment

# Product with columns (n, j) of the systems with these numbers (j,); systems may have different matrices.
Product = Callable[[Tensor, Tensor], Tensor]
# Kind of a breakdown, and its iteration.
Breakdown = tuple[str, int]
CURVATURE = "curvature"
PRECONDITIONER = "preconditioner"


@dataclass(eq=False)
class Descent:
    """Result of conjugate gradients."""

    solution: Tensor
    # Norms of the recursive residuals, (k,).
    norms: Tensor
    iterations: int
    # Systems that ended early: by `CURVATURE` or a `PRECONDITIONER` that is not positive.
    breakdowns: dict[int, Breakdown]

    @classmethod
    def of(cls, state: State) -> Descent:
        """Return a saved result."""
        solution, saved = state.blocks["solution"], state.numbers
        norms = torch.tensor(saved["norms"], dtype=precise(solution).dtype, device=solution.device)
        breakdowns = {column: (kind, iteration) for column, kind, iteration in saved["breakdowns"]}
        return cls(solution, norms, saved["iterations"], breakdowns)

    @property
    def state(self) -> State:
        """State of the result."""
        breakdowns = [[column, *each] for column, each in self.breakdowns.items()]
        numbers = {"norms": self.norms.tolist(), "iterations": self.iterations, "breakdowns": breakdowns}
        return State(numbers, {"solution": self.solution})

    def end(self, columns: Tensor, kind: str) -> None:
        """Record that these systems break down in the next iteration."""
        for column in columns.tolist():
            self.breakdowns[column] = kind, self.iterations + 1


def conjugate_gradients(
    product: Product,
    b: Tensor,
    targets: Tensor,
    max_iterations: int,
    *,
    precondition: Callable[[Tensor], Tensor] | None = None,
    watch: Callable[[int, Tensor], None] | None = None,
    dots: Callable[[Tensor, Tensor], Tensor] | None = None,
    saved: State | None = None,
    keep: Keep | None = None,
) -> Descent:
    r"""Minimize $\frac12 x^T A x - b^T x$ over a growing Krylov space, with separate steps and stops for each column.

    Solved columns leave the block and cost no further products.

    Args:
        product: Product with the columns of some systems.
        b: Right-hand sides, (n, k).
        targets: Norms that residuals must reach, (k,).
        max_iterations: Maximum number of iterations.
        precondition: Approximation of the inverse, for blocks.
        watch: Called after each iteration as `watch(iteration, norms)`, with the norms of systems that were open in it.
        dots: Computes inner products of columns; by default of vectors on this process.
        saved: State from which to go on.
        keep: Called before each iteration with a function that returns the state.

    Returns:
        Solutions, norms of residuals and breakdowns.

    Source: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. NBS 49 (1952).
    """
    solution, norms = torch.zeros_like(b), norms_of(b) if dots is None else dots(b, b).sqrt()
    dots = _dots if dots is None else dots
    if saved is None:
        found = Descent(solution, norms, 0, {})
        columns, r, targets = _keep(~(norms <= targets), torch.arange(b.shape[1], device=b.device), b, targets)
        if not len(columns):
            return found
        z = r if precondition is None else precondition(r)
        p, rz = z, dots(r, z)
    else:
        found = Descent.of(saved)
        solution, norms, r, p = found.solution, found.norms, saved.blocks["r"], saved.blocks["p"]
        columns = torch.tensor(saved.numbers["columns"], device=b.device)
        rz, targets = (norms.new_tensor(saved.numbers[name]) for name in ("rz", "targets"))
    while True:
        if keep is not None:
            keep(lambda: _open(found, columns, r, p, rz, targets))  # noqa: B023 - called at once
        usable = (rz > 0) & torch.isfinite(rz)
        if not bool(usable.all()):
            found.end(columns[~usable], PRECONDITIONER)
            columns, r, p, rz, targets = _keep(usable, columns, r, p, rz, targets)
        if not len(columns) or found.iterations >= max_iterations:
            return found

        image = product(p, columns)
        curvature = dots(p, image)
        curved = curvature > 0
        if not bool(curved.all()):
            found.end(columns[~curved], CURVATURE)
            columns, r, p, rz, targets, image, curvature = _keep(curved, columns, r, p, rz, targets, image, curvature)
        length = (rz / curvature).to(r.dtype)
        if len(columns) == b.shape[1]:
            solution += length * p
        else:
            solution.index_add_(1, columns, length * p)
        r = r - length * image
        found.iterations += 1
        squares = dots(r, r)
        sizes = squares.sqrt()
        norms[columns] = sizes
        if watch is not None:
            watch(found.iterations, sizes)
        columns, r, p, rz, targets, squares = _keep(sizes > targets, columns, r, p, rz, targets, squares)
        if not len(columns):
            return found
        z = r if precondition is None else precondition(r)
        ahead = squares if precondition is None else dots(r, z)
        p = z + (ahead / rz).to(r.dtype) * p
        rz = ahead


def increment(system: DampedSystem, residual: Tensor, targets: Tensor) -> Increment:
    """Solve a positive definite system for an increment by conjugate gradients."""

    def run(saved: State | None, keep: Keep) -> State:
        return conjugate_gradients(
            lambda block, _: system.apply(block),
            residual,
            targets,
            system.left,
            precondition=system.precondition,
            watch=system.advance,
            dots=system.view.dots,
            saved=saved,
            keep=keep,
        ).state

    system.increments += 1
    found = Descent.of(system.stages.stage(f"increment {system.increments}", run))
    system.advance_to(found.iterations)
    reasons: list[str | None] = [None] * residual.shape[1]
    for column, (kind, iteration) in found.breakdowns.items():
        reasons[column] = REASONS[kind].format(system.offset + iteration)
    return Increment(found.solution, reasons)


REASONS = {
    CURVATURE: "negative curvature met at iteration {}: A + damping I is not positive definite; raise damping or use "
    'method="minres"',
    PRECONDITIONER: "the preconditioner is not positive definite at iteration {}; make it so",
}


def _open(found: Descent, columns: Tensor, r: Tensor, p: Tensor, rz: Tensor, targets: Tensor) -> State:
    """Return the state of an iteration."""
    numbers = {"columns": columns.tolist(), "rz": rz.tolist(), "targets": targets.tolist()}
    done = found.state
    return State({**done.numbers, **numbers}, {**done.blocks, "r": r, "p": p})


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (precise(a) * b).sum(0)


def _keep(mask: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    return parts if bool(mask.all()) else tuple(part[..., mask] for part in parts)
