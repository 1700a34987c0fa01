"""Newton's method for many problems at once, each in a trust region of its own, with its Hessian."""

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

# As SciPy's: by what balls shrink and grow, and between which quotients they stay.
SHRINKAGE, GROWTH, POOR, GOOD = 0.25, 2.0, 0.25, 0.75


@dataclass(frozen=True)
class TrustExactOptions:
    """Options, with the names and defaults of SciPy's."""

    maxiter: Annotated[int | None, COUNT] = None
    gtol: Annotated[float, TOLERANCE] = 1e-4
    initial_trust_radius: Annotated[float, POSITIVE] = 1.0
    max_trust_radius: Annotated[float, POSITIVE] = 1000.0
    eta: Annotated[float, FRACTION] = 0.15


@dataclass
class TrustExact(Rows):
    """Where the problems that still run are."""

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
        """At the starts."""
        x = problems.start
        found = problems.at(x)
        gradient, hessian = found.gradients_and_hessians()
        index = torch.arange(len(x), device=x.device)
        radius = torch.full_like(found.values, min(options.initial_trust_radius, options.max_trust_radius))
        ones = torch.ones_like(index)
        start = cls(
            problems, options, index, ones, x, found.values, gradient, hessian, radius, 0 * ones, ones, ones.clone()
        )
        start.status = start.verdict()
        return start

    def advance(self) -> None:
        """One step of each problem."""
        options = self.options
        steps = steps_in_balls(self.hessian, self.gradient, self.radius)
        x = self.x + steps.step
        found = self.problems.at(x)
        gradient, hessian = found.gradients_and_hessians()
        quotient = self._quotient(found.values, gradient, steps.change)
        # NaN is no progress.
        taken = (quotient > options.eta) & _finite(found.values, gradient, hessian)
        wide = (quotient > GOOD) & steps.bounded & taken
        self.radius = torch.where(
            (quotient >= POOR) & taken,
            torch.where(wide, GROWTH * self.radius, self.radius).clamp_max(options.max_trust_radius),
            SHRINKAGE * self.radius,
        )
        size = length(steps.step)
        # A ball wider than a step that was refused would only refuse it again.
        self.radius = torch.where(taken, self.radius, self.radius.minimum(SHRINKAGE * size))
        stuck = ~taken & (size <= self.problems.eps * length(self.x))
        self.x = chosen(taken, x, self.x)
        self.value = torch.where(taken, found.values, self.value)
        self.gradient = chosen(taken, gradient, self.gradient)
        self.hessian = chosen(taken, hessian, self.hessian)
        self.nit, self.nfev, self.njev = self.nit + 1, self.nfev + 1, self.njev + 1
        self.status = torch.where(stuck, PRECISION.status, self.verdict())

    def written(self) -> Written:
        """What a result tells of each problem."""
        counts = {"nit": self.nit, "nfev": self.nfev, "njev": self.njev, "nhev": self.njev}
        return {"x": self.x, "fun": self.value, "jac": self.gradient, "hess": self.hessian, **counts}

    def _quotient(self, value: Tensor, gradient: Tensor, change: Tensor) -> Tensor:
        """How far values fall for what models said; where both are rounding, whether the gradient does."""
        noise = 10 * self.problems.eps * self.value.abs().maximum(value.abs())
        quotient = (self.value - value + noise) / (noise - change)
        told = (-change > noise) | (length(gradient) < length(self.gradient))
        return torch.where(told & (change < 0), quotient, -torch.inf)

    def verdict(self) -> Tensor:
        """The number of the end of each, or `RUNNING`."""
        most = self.options.maxiter if self.options.maxiter is not None else 200 * self.x.shape[1]
        status = torch.full_like(self.nit, RUNNING)
        status[self.nit >= most] = ITERATIONS.status
        status[length(self.gradient) < self.options.gtol] = CONVERGED.status
        status[~_finite(self.value, self.gradient, self.hessian)] = NONFINITE.status
        return status


def _finite(value: Tensor, gradient: Tensor, hessian: Tensor) -> Tensor:
    return torch.isfinite(value) & torch.isfinite(gradient).all(-1) & torch.isfinite(hessian).all(-1).all(-1)


def trust_exact(problems: Problems, options: TrustExactOptions, _: Box | None) -> TrustExact:
    """The method, without bounds."""
    return TrustExact.begin(problems, options)
