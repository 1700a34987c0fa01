"""Trust-region Newton method with exact Hessians, for many problems at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hodiff.optim.batched.ball import steps_in_balls
from hodiff.optim.batched.bounds import Box
from hodiff.optim.batched.problems import Problems
from hodiff.optim.batched.rows import RUNNING, Rows, Written, chosen, length
from hodiff.optim.ends import CONVERGED, ITERATIONS, NONFINITE, PRECISION
from hodiff.optim.own_options import COUNT, FRACTION, POSITIVE, TOLERANCE

# SciPy's constants: shrinkage and growth of balls, and the ratios between which balls keep their radius.
SHRINKAGE, GROWTH, POOR, GOOD = 0.25, 2.0, 0.25, 0.75


@dataclass(frozen=True)
class TrustExactOptions:
    """Options of "trust-exact", with SciPy's names and defaults."""

    maxiter: Annotated[int | None, COUNT] = None
    gtol: Annotated[float, TOLERANCE] = 1e-4
    initial_trust_radius: Annotated[float, POSITIVE] = 1.0
    max_trust_radius: Annotated[float, POSITIVE] = 1000.0
    eta: Annotated[float, FRACTION] = 0.15


@dataclass
class TrustExact(Rows):
    """State of the problems that still run."""

    problems: Problems
    options: TrustExactOptions
    index: Tensor
    status: Tensor
    x: Tensor
    value: Tensor
    gradient: Tensor
    hessian: Tensor
    radius: Tensor
    nit: Tensor
    nfev: Tensor
    njev: Tensor

    @classmethod
    def begin(cls, problems: Problems, options: TrustExactOptions) -> TrustExact:
        """Evaluate the starts."""
        x = problems.start
        found = problems.at(x)
        gradient, hessian = found.gradients_and_hessians()
        index = torch.arange(len(x), device=x.device)
        radius = torch.full_like(found.values, min(options.initial_trust_radius, options.max_trust_radius))
        ones = torch.ones_like(index)
        start = cls(
            problems, options, index, ones, x, found.values, gradient, hessian, radius, 0 * ones, ones, ones.clone()
        )
        start.status = start.status_now()
        return start

    def advance(self) -> None:
        """Take one step of every problem."""
        options = self.options
        steps = steps_in_balls(self.hessian, self.gradient, self.radius)
        x = self.x + steps.step
        found = self.problems.at(x)
        gradient, hessian = found.gradients_and_hessians()
        quotient = self._quotient(found.values, gradient, steps.change)
        # NaN fails this comparison and counts as no progress.
        taken = (quotient > options.eta) & _finite(found.values, gradient, hessian)
        wide = (quotient > GOOD) & steps.bounded & taken
        self.radius = torch.where(
            (quotient >= POOR) & taken,
            torch.where(wide, GROWTH * self.radius, self.radius).clamp_max(options.max_trust_radius),
            SHRINKAGE * self.radius,
        )
        size = length(steps.step)
        # A ball wider than a rejected step would only produce the step again.
        self.radius = torch.where(taken, self.radius, self.radius.minimum(SHRINKAGE * size))
        stuck = ~taken & (size <= self.problems.eps * length(self.x))
        self.x = chosen(taken, x, self.x)
        self.value = torch.where(taken, found.values, self.value)
        self.gradient = chosen(taken, gradient, self.gradient)
        self.hessian = chosen(taken, hessian, self.hessian)
        self.nit, self.nfev, self.njev = self.nit + 1, self.nfev + 1, self.njev + 1
        self.status = torch.where(stuck, PRECISION.status, self.status_now())

    def written(self) -> Written:
        """Return the columns of the result."""
        counts = {"nit": self.nit, "nfev": self.nfev, "njev": self.njev, "nhev": self.njev}
        return {"x": self.x, "fun": self.value, "jac": self.gradient, "hess": self.hessian, **counts}

    def _quotient(self, value: Tensor, gradient: Tensor, change: Tensor) -> Tensor:
        """Return ratios of actual to predicted decrease; within rounding, -inf unless the gradient's norm falls."""
        noise = 10 * self.problems.eps * self.value.abs().maximum(value.abs())
        quotient = (self.value - value + noise) / (noise - change)
        told = (-change > noise) | (length(gradient) < length(self.gradient))
        return torch.where(told & (change < 0), quotient, -torch.inf)

    def status_now(self) -> Tensor:
        """Return the numbers of the ends of problems, or `RUNNING`."""
        most = self.options.maxiter if self.options.maxiter is not None else 200 * self.x.shape[1]
        status = torch.full_like(self.nit, RUNNING)
        status[self.nit >= most] = ITERATIONS.status
        status[length(self.gradient) < self.options.gtol] = CONVERGED.status
        status[~_finite(self.value, self.gradient, self.hessian)] = NONFINITE.status
        return status


def _finite(value: Tensor, gradient: Tensor, hessian: Tensor) -> Tensor:
    return torch.isfinite(value) & torch.isfinite(gradient).all(-1) & torch.isfinite(hessian).all(-1).all(-1)


def trust_exact(problems: Problems, options: TrustExactOptions, _: Box | None) -> TrustExact:
    """Begin the method; it ignores bounds."""
    return TrustExact.begin(problems, options)
