"""Approximate products with the inverse of an inner Hessian, one function for each method.

Conversion of lists of tensors, one for each leaf of the parameters, to columns for linear solvers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.estimators.results import norms_of
from hodiff.estimators.systems.conjugate_gradients import conjugate_gradients
from hodiff.estimators.systems.neumann import neumann_series, safe_step_size
from hodiff.estimators.systems.preconditioners import NystromPreconditioner

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
    """Solve a system for each task by conjugate gradients; return solutions and relative residuals (tasks,)."""
    # `product` multiplies vectors of all tasks, leaves (tasks, *shape), by the tasks' matrices, at most `steps` times.
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


# Maps a right-hand side to an approximate solution.
Inverse = Callable[[Sequence[Tensor]], Vector]
# Number of power iterations that estimate the largest eigenvalue.
POWER_STEPS = 20
# Default maximum number of conjugate gradient steps.
CG_STEPS = 100


@dataclass(eq=False)
class InnerHessian:
    """Damped inner Hessian at a point, with recorded products, which are counted."""

    # Inner gradient with its graph, and the leaves with respect to which it is computed.
    slopes: Sequence[Tensor]
    leaves: Sequence[Tensor]
    damping: float
    products: int = 0

    def __post_init__(self) -> None:
        self._layout = Columns(self.leaves, 1)

    def __call__(self, v: Sequence[Tensor]) -> Vector:
        """Multiply the damped Hessian with a vector."""
        self.products += 1
        return [Hu + self.damping * u for Hu, u in zip(pulled(self.slopes, self.leaves, v), v, strict=True)]

    def times(self, column: Tensor) -> Tensor:
        """Multiply the damped Hessian with a column (n, 1)."""
        return self.column(self(self.vector(column)))

    def column(self, v: Sequence[Tensor]) -> Tensor:
        """Join a vector to a column (n, 1)."""
        return self._layout.join(v)

    def vector(self, column: Tensor) -> Vector:
        """Split a column into a vector, the inverse of `column`."""
        return self._layout.split(column)


def pulled(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Vector:
    """Compute gradients of outputs with respect to inputs, zero if there is no dependence."""
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    y, u = zip(*pairs, strict=True)
    return list(torch.autograd.grad(y, list(inputs), u, retain_graph=True, materialize_grads=True))


def by_conjugate_gradients(
    H: InnerHessian, iterations: int, tolerance: float, step: float | None, generator: torch.Generator | None
) -> Inverse:
    """Return a solver by conjugate gradients, for a positive definite Hessian."""
    del step, generator
    return _preconditioned(H, iterations, tolerance, None)


def _preconditioned(
    H: InnerHessian, iterations: int, tolerance: float, precondition: NystromPreconditioner | None
) -> Inverse:
    def solve(b: Sequence[Tensor]) -> Vector:
        right = H.column(b)
        targets = tolerance * norms_of(right)
        found = conjugate_gradients(
            lambda column, _: H.times(column), right, targets, iterations, precondition=precondition
        )
        return H.vector(found.solution)

    return solve


def by_neumann_series(
    H: InnerHessian, iterations: int, tolerance: float, step: float | None, generator: torch.Generator | None
) -> Inverse:
    r"""Return $\alpha \sum_{k < K} (I - \alpha H)^k$ as a solver; a power iteration estimates $\alpha$ by default."""
    if step is None:
        start = [torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device) for x in H.leaves]
        step = safe_step_size(H.times, H.column(start), POWER_STEPS)

    def solve(b: Sequence[Tensor]) -> Vector:
        right = H.column(b)
        total, _ = neumann_series(H.times, right, tolerance * norms_of(right), step, iterations)
        return H.vector(total)

    return solve


def by_nystrom(
    H: InnerHessian, iterations: int, tolerance: float, step: float | None, generator: torch.Generator | None
) -> Inverse:
    r"""Return a solver by conjugate gradients, preconditioned by `iterations` random columns of the Hessian."""
    del step
    total = sum(leaf.numel() for leaf in H.leaves)
    chosen = torch.randperm(total, generator=generator, device=generator.device if generator else None)
    chosen = chosen[: min(iterations, total)].to(H.leaves[0].device)
    units = H.column(H.leaves).detach().new_zeros(total, len(chosen))
    units[chosen, torch.arange(len(chosen), device=units.device)] = 1
    C = torch.cat([H.times(unit[:, None]) for unit in units.unbind(1)], dim=1) - H.damping * units
    core = C[chosen]
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    # Directions of rounding errors and of negative curvature are left out: a preconditioner must be positive definite.
    kept = values > len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    if not bool(kept.any()):
        return by_conjugate_gradients(H, CG_STEPS, tolerance, None, None)
    directions, singular, _ = torch.linalg.svd(C @ (vectors[:, kept] / values[kept].sqrt()), full_matrices=False)
    precondition = NystromPreconditioner(singular.square(), directions, H.damping, len(chosen))
    return _preconditioned(H, CG_STEPS, tolerance, precondition)


def norm(v: Sequence[Tensor]) -> float:
    """Compute the joint Euclidean norm of all tensors."""
    return float(torch.stack([each.square().sum() for each in v]).sum().sqrt())
