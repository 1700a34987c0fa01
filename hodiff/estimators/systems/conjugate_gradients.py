"""Preconditioned conjugate gradients for several systems at once, on the device of their right-hand sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.estimators.precision import norms_of, precise
from hodiff.estimators.systems.damped_systems import DampedSystem, Increment

# The product with columns (n, j) of the systems with these numbers (j,), each of which may have a matrix of its own.
Product = Callable[[Tensor, Tensor], Tensor]
# Why a system cannot be brought further, and at which iteration.
Breakdown = tuple[str, int]
CURVATURE = "curvature"
PRECONDITIONER = "preconditioner"


@dataclass(eq=False)
class Descent:
    """Where conjugate gradients stopped."""

    solution: Tensor
    # Norms of the residuals (k,) as the algorithm knows them.
    norms: Tensor
    iterations: int
    # What ended a system early: `CURVATURE` that is not positive, or a `PRECONDITIONER` that is not.
    breakdowns: dict[int, Breakdown]

    def end(self, columns: Tensor, kind: str) -> None:
        """Note that these systems break down in the coming iteration."""
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
) -> Descent:
    r"""Minimize $\frac12 x^T A x - b^T x$ over a growing Krylov space, each column with its own steps and its own stop.

    Columns that are done leave the block, and cost no more products.

    Args:
        product: The product with the columns of some systems.
        b: Right-hand sides, (n, k).
        targets: Norms to which residuals are to be reduced, (k,).
        max_iterations: Most iterations.
        precondition: An approximation of the inverse, for blocks.
        watch: Called after each iteration as `watch(iteration, norms)` with the systems that were open in it.

    Returns:
        Solutions, and how good they are.

    Source: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. NBS 49 (1952).
    """
    solution, norms = torch.zeros_like(b), norms_of(b)
    found = Descent(solution, norms, 0, {})
    columns, r, targets = _keep(~(norms <= targets), torch.arange(b.shape[1], device=b.device), b, targets)
    if not len(columns):
        return found
    z = r if precondition is None else precondition(r)
    p, rz = z, _dots(r, z)
    while True:
        usable = (rz > 0) & torch.isfinite(rz)
        if not bool(usable.all()):
            found.end(columns[~usable], PRECONDITIONER)
            columns, r, p, rz, targets = _keep(usable, columns, r, p, rz, targets)
        if not len(columns) or found.iterations >= max_iterations:
            return found

        image = product(p, columns)
        curvature = _dots(p, image)
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
        squares = _dots(r, r)
        sizes = squares.sqrt()
        norms[columns] = sizes
        if watch is not None:
            watch(found.iterations, sizes)
        columns, r, p, rz, targets, squares = _keep(sizes > targets, columns, r, p, rz, targets, squares)
        if not len(columns):
            return found
        z = r if precondition is None else precondition(r)
        ahead = squares if precondition is None else _dots(r, z)
        p = z + (ahead / rz).to(r.dtype) * p
        rz = ahead


def increment(system: DampedSystem, residual: Tensor, targets: Tensor) -> Increment:
    """Solve for what is left by conjugate gradients; the system is positive definite."""
    found = conjugate_gradients(
        lambda block, _: system.apply(block),
        residual,
        targets,
        system.left,
        precondition=system.precondition,
        watch=system.advance,
    )
    reasons: list[str | None] = [None] * residual.shape[1]
    for column, (kind, iteration) in found.breakdowns.items():
        reasons[column] = REASONS[kind].format(system.offset + iteration)
    return Increment(found.solution, reasons)


REASONS = {
    CURVATURE: "negative curvature met at iteration {}: A + damping I is not positive definite; raise damping or use "
    'method="minres"',
    PRECONDITIONER: "the preconditioner is not positive definite at iteration {}; make it so",
}


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (precise(a) * b).sum(0)


def _keep(mask: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """The columns of each part for which the mask is true."""
    return parts if bool(mask.all()) else tuple(part[..., mask] for part in parts)
