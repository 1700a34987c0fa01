r"""Levenberg-Marquardt method for many problems at once, within bounds.

$$ (J^T J + \lambda D^2)\, p = -J^T r, \qquad x_+ = P(x + p) $$

The system contains the unknowns that their gradient does not hold at a bound. The damping follows the ratio of actual
to predicted decrease of the cost.

Source: K. Madsen, H. Nielsen & O. Tingleff, *Methods for Non-Linear Least Squares Problems*, 2nd ed. (2004), section
3.2, for the damping; J. Moré, "The Levenberg-Marquardt algorithm", LNM 630 (1978), for the scales; C. Kanzow,
N. Yamashita & M. Fukushima, J. Comput. Appl. Math. 172 (2004), for the projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.module_state import attributes_put_back
from hodiff.corrections import Corrections
from hodiff.derivatives import jacobian
from hodiff.optimize.batched.batch import Batch, Box, InDims, Mapped
from hodiff.optimize.batched.running_rows import RUNNING, Rows, Written, chosen, inner, length, times
from hodiff.optimize.objective import vector_of
from hodiff.recompute.reachable import named_modules

CALLER = "least_squares"
# The first damping relative to the largest squared column, its growth at the first rejection, the smallest accepted
# fraction of the predicted decrease, and the units in the last place that count as rounding.
FIRST, GROWTH, LEAST, ROUNDING = 1e-3, 2.0, 1e-4, 4


@dataclass(frozen=True)
class Limits:
    """Limits of a run: SciPy's tolerances, None to ignore one, and the most evaluations, None for 100 n."""

    ftol: float | None
    xtol: float | None
    gtol: float | None
    most: int | None


class Residuals:
    """Residuals and Jacobians of the problems that still run, as rows of float64.

    Attributes:
        start: Starts of all problems, (B, n).
        eps: Machine epsilon of the dtype in which residuals are computed.
    """

    def __init__(self, f: Callable[..., Any], batch: Batch, args: tuple[Any, ...], in_dims: InDims):
        self.start, self.eps = batch.start, torch.finfo(batch.space.dtype).eps
        self._mapped, self._dtype = Mapped(CALLER, f, batch, args, in_dims), batch.space.dtype
        self._f = f

    def retain(self, keep: Tensor) -> None:
        """Drop the arguments of problems that are not in the mask `keep`."""
        self._mapped.retain(keep)

    def at(self, x: Tensor) -> Tensor:
        """Compute the residuals (b, m)."""
        return self._over(x, _vector)

    def jacobians(self, x: Tensor) -> Tensor:
        """Compute the Jacobians (b, m, n)."""
        return self._over(x, lambda f: jacobian(_vector(f)))

    def _over(self, x: Tensor, transform: Callable[..., Any]) -> Tensor:
        with torch.no_grad(), attributes_put_back(list(named_modules(self._f))), Corrections():
            found: Tensor = self._mapped.over(x.to(self._dtype), transform)
        return found.detach().to(torch.float64)


def _vector(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: vector_of(CALLER, "f", f(x), x)


@dataclass
class LevenbergMarquardt(Rows):
    """State of the problems that still run."""

    problems: Residuals
    limits: Limits
    box: Box | None
    # Scales of the unknowns, (b, n), and whether they follow the columns of the Jacobian.
    scales: Tensor
    by_columns: bool
    index: Tensor
    status: Tensor
    x: Tensor
    residuals: Tensor
    cost: Tensor
    jacobian: Tensor
    gradient: Tensor
    damping: Tensor
    growth: Tensor
    nit: Tensor
    nfev: Tensor
    njev: Tensor

    @classmethod
    def begin(cls, problems: Residuals, limits: Limits, box: Box | None, scales: Tensor | None) -> LevenbergMarquardt:
        """Evaluate the starts; `scales` of None follow the columns of the Jacobian."""
        x = problems.start if box is None else box.project(problems.start)
        residuals, matrix = problems.at(x), problems.jacobians(x)
        gradient, index = times(matrix.mT, residuals), torch.arange(len(x), device=x.device)
        ones = torch.ones_like(index)
        start = cls(
            problems,
            limits,
            box,
            torch.zeros_like(x) if scales is None else scales,
            scales is None,
            index,
            ones,
            x,
            residuals,
            inner(residuals, residuals) / 2,
            matrix,
            gradient,
            torch.ones_like(x[:, 0]),
            torch.full_like(x[:, 0], GROWTH),
            0 * ones,
            ones,
            ones,
        )
        start.status = start.status_now(torch.full_like(index, RUNNING))
        start.rescale()
        columns = matrix / start.scales[:, None, :]
        start.damping = FIRST * columns.square().sum(1).amax(-1).clamp_min(torch.finfo(x.dtype).tiny)
        return start

    def advance(self) -> None:
        """Take one step of every problem."""
        limits, box = self.limits, self.box
        step, solved = self._step()
        # A step of NaN is replaced by zero, as a function that raises at NaN would end all problems.
        x = self.x + torch.where(solved[:, None] & torch.isfinite(step), step, 0.0)
        x = x if box is None else box.project(x)
        step = x - self.x
        residuals = self.problems.at(x)
        cost = inner(residuals, residuals) / 2
        actual = self.cost - cost
        predicted = self.cost - (self.residuals + times(self.jacobian, step)).square().sum(-1) / 2
        quotient = torch.where(predicted > 0, actual / predicted, -torch.inf)
        # NaN fails these comparisons and counts as no progress.
        taken = (actual > 0) & (quotient > LEAST)
        matrix = chosen(taken, self.problems.jacobians(x), self.jacobian) if bool(taken.any()) else self.jacobian
        eased = (1 - (2 * quotient - 1) ** 3).clamp(1 / 3, 1)
        self.damping = torch.where(taken, self.damping * eased, self.damping * self.growth)
        self.growth = torch.where(taken, GROWTH, 2 * self.growth)
        small = short = torch.zeros_like(taken)
        # Changes within rounding are too small for any tolerance.
        if limits.ftol is not None:
            least = max(limits.ftol, ROUNDING * self.problems.eps) * self.cost
            small = (actual.abs() < least) & (predicted < least)
        if limits.xtol is not None:
            xtol = max(limits.xtol, self.problems.eps)
            short = length(step) < xtol * (xtol + length(self.x))
        status = torch.full_like(self.index, RUNNING)
        status[self.nfev + 1 >= (limits.most or 100 * self.x.shape[1])] = 0
        still = solved & (length(step) == 0)
        status[small & solved], status[(short & solved) | still], status[small & short & solved] = 2, 3, 4
        self.x = chosen(taken, x, self.x)
        self.residuals = chosen(taken, residuals, self.residuals)
        self.cost = torch.where(taken, cost, self.cost)
        self.jacobian, self.gradient = matrix, times(matrix.mT, self.residuals)
        self.nit, self.nfev, self.njev = self.nit + taken, self.nfev + 1, self.njev + taken
        self.status = self.status_now(status)
        self.rescale()

    def written(self) -> Written:
        """Return the columns of the result."""
        still = self._free_gradient().abs().amax(-1)
        active = torch.zeros_like(self.x) if self.box is None else self.box.active(self.x)
        found = {"x": self.x, "cost": self.cost, "fun": self.residuals, "jac": self.jacobian, "grad": self.gradient}
        counts = {"nit": self.nit, "nfev": self.nfev, "njev": self.njev}
        return {**found, "optimality": still, "active_mask": active, **counts}

    def _step(self) -> tuple[Tensor, Tensor]:
        """Solve the damped normal equations in scaled unknowns; also return where they are positive definite."""
        free = torch.ones_like(self.x) if self.box is None else (~self.box.holds(self.x, -self.gradient)).to(self.x)
        unit = free / self.scales
        columns = self.jacobian * unit[:, None, :]
        diagonal = self.damping[:, None] * free + (1 - free)
        factor, fault = torch.linalg.cholesky_ex(columns.mT @ columns + torch.diag_embed(diagonal))
        scaled = -torch.cholesky_solve((unit * self.gradient)[..., None], factor)[..., 0]
        return unit * scaled, fault == 0

    def rescale(self) -> None:
        """Update the scales as MINPACK does: they never shrink, and columns of zeros have scale one."""
        if self.by_columns:
            grown = self.scales.maximum(torch.linalg.vector_norm(self.jacobian, dim=1))
            self.scales = torch.where(grown > 0, grown, 1.0)

    def _free_gradient(self) -> Tensor:
        if self.box is None:
            return self.gradient
        return torch.where(self.box.holds(self.x, -self.gradient), 0.0, self.gradient)

    def status_now(self, status: Tensor) -> Tensor:
        """Enter the numbers of problems that end at this point into `status`, and return it."""
        if self.limits.gtol is not None:
            status[self._free_gradient().abs().amax(-1) < self.limits.gtol] = 1
        status[~(torch.isfinite(self.cost) & torch.isfinite(self.jacobian).all(-1).all(-1))] = -1
        return status
