r"""Trust-region Newton method with exact Hessians, for many problems at once, and its quadratic models, each in a ball.

$$ \min_p\; g^T p + \tfrac12 p^T H p \quad\text{with}\quad \|p\| \le r $$

If H is positive definite and its Newton step lies in the ball, that is the step, by a Cholesky factorization.
Otherwise p solves $(H + \lambda I)\,p = -g$ with $\|p\| = r$. In the basis of eigenvectors, Newton's method for
$1/\|p(\lambda)\| = 1/r$ converges to the solution from below.

Source: J. Moré & D. Sorensen, SIAM J. Sci. Stat. Comput. 4 (1983); A. Conn, N. Gould & Ph. Toint, *Trust-Region
Methods*, section 7.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hodiff.optimize.batched.batch import Box
from hodiff.optimize.batched.problems import Problems
from hodiff.optimize.batched.running_rows import RUNNING, Rows, Written, chosen, inner, length, times
from hodiff.optimize.method_options import COUNT, FRACTION, POSITIVE, TOLERANCE
from hodiff.optimize.terminations import CONVERGED, ITERATIONS, NONFINITE, PRECISION

# Newton's method converges quadratically: it needs four to ten iterations.
MOST = 50
RADIUS_PRECISION = 1e-10


@dataclass
class Steps:
    """Steps (b, n), the models' changes (b,), and whether the steps end at the boundary (b,)."""

    step: Tensor
    change: Tensor
    bounded: Tensor


def steps_in_balls(hessian: Tensor, gradient: Tensor, radius: Tensor) -> Steps:
    """Minimise finite models (b, n, n), (b, n) in balls of the radii (b,)."""
    factor, fault = torch.linalg.cholesky_ex(hessian)
    newton = -torch.cholesky_solve(gradient[..., None], factor)[..., 0]
    within = (fault == 0) & (length(newton) <= radius)
    found = Steps(newton, inner(gradient, newton) / 2, ~within)
    if not bool(within.all()):
        rest = ~within
        found.step[rest], found.change[rest], found.bounded[rest] = _at_boundary(
            hessian[rest], gradient[rest], radius[rest]
        )
    return found


def _at_boundary(hessian: Tensor, gradient: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(hessian)
    g = times(vectors.mT, gradient)
    rounding = torch.finfo(values.dtype).eps * values.abs().amax(-1)
    # The iteration uses the raised lowest eigenvalue, as the shift itself would lose digits by cancellation.
    gaps = values - values[:, :1]
    # The largest shift at which a single element of p has length r is a lower bound of the solution's shift.
    raised = (g.abs() / radius[:, None] - gaps).amax(-1).maximum(rounding)
    for _ in range(MOST):
        p = _raised(g, gaps, raised)
        norm = length(p)
        # If the norm is below the radius from the start, the gradient has no part along the lowest eigenvector.
        outside = norm > radius * (1 + RADIUS_PRECISION)
        if not bool(outside.any()):
            break
        slope = inner(p, p / (gaps + raised[:, None]))
        raised = torch.where(outside, raised + norm.square() / slope * (norm / radius - 1), raised)
    p, bounded = _to_boundary(_raised(g, gaps, raised), values[:, 0] < -rounding, radius)
    change = inner(g, p) + inner(values, p.square()) / 2
    return times(vectors, p), change, bounded


def _raised(g: Tensor, gaps: Tensor, raised: Tensor) -> Tensor:
    """Solve in the basis of eigenvectors; elements with a zero gradient are zero."""
    return -torch.where(g == 0, 0.0, g / (gaps + raised[:, None]))


def _to_boundary(p: Tensor, indefinite: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Handle the hard case: if H is indefinite and p is too short, extend p along the lowest eigenvector."""
    missing = (radius.square() - inner(p, p)).clamp_min(0)
    falls_short = (missing > 4 * RADIUS_PRECISION * radius.square()) & indefinite
    head = p[:, 0]
    # The sign is that of the direction in which the model falls.
    along = torch.where(head >= 0, 1.0, -1.0) * (head.square() + missing).sqrt()
    p = torch.cat([torch.where(falls_short, along, head)[:, None], p[:, 1:]], -1)
    return p, falls_short | (missing <= 4 * RADIUS_PRECISION * radius.square())


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
