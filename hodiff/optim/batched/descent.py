r"""Quasi-Newton methods for many problems at once; each round evaluates the next trial of every line search.

With bounds the steps are projected, $x(t) = P(x + t d)$. d is computed in the space of the unknowns that their
gradient does not hold at a bound.

Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., chapters 6 and 7; D. Bertsekas, SIAM J. Control
Optim. 20 (1982), for the projection; R. Byrd, P. Lu, J. Nocedal & C. Zhu, SIAM J. Sci. Comput. 16 (1995), for
termination.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hodiff.optim.batched.boxes import Box
from hodiff.optim.batched.line_search import Search
from hodiff.optim.batched.memories import DenseInverse, LimitedMemory, Memory
from hodiff.optim.batched.problems import Problems
from hodiff.optim.batched.running_rows import RUNNING, Rows, Written, chosen, inner, length
from hodiff.optim.ends import CONVERGED, ITERATIONS, NONFINITE, PRECISION, End
from hodiff.optim.own_options import COUNT, FRACTION, PAIRS, TOLERANCE

# Internal number of an end whose status is that of `CONVERGED`.
FLAT_NUMBER = 4
FLAT = End(CONVERGED.status, "Optimization terminated successfully: the value falls by less than ftol.")
ENDS = {end.status: end for end in (CONVERGED, ITERATIONS, PRECISION, NONFINITE)} | {FLAT_NUMBER: FLAT}


@dataclass(frozen=True)
class BfgsOptions:
    """Options of "bfgs", with SciPy's names and defaults."""

    maxiter: Annotated[int | None, COUNT] = None
    gtol: Annotated[float, TOLERANCE] = 1e-5
    ftol: Annotated[float, TOLERANCE] = 0.0
    c1: Annotated[float, FRACTION] = 1e-4
    c2: Annotated[float, FRACTION] = 0.9


@dataclass(frozen=True)
class LbfgsbOptions(BfgsOptions):
    """Options of "l-bfgs-b", with SciPy's names and defaults."""

    maxiter: Annotated[int | None, COUNT] = 15000
    ftol: Annotated[float, TOLERANCE] = 1e7 * torch.finfo(torch.float64).eps
    maxcor: Annotated[int, PAIRS] = 10


@dataclass
class Descent(Rows):
    """State of the problems that still run, with their line searches."""

    problems: Problems
    options: BfgsOptions
    box: Box | None
    memory: Memory
    index: Tensor
    status: Tensor
    x: Tensor
    value: Tensor
    gradient: Tensor
    direction: Tensor
    search: Search
    nit: Tensor
    nfev: Tensor

    @classmethod
    def begin(cls, problems: Problems, options: BfgsOptions, box: Box | None, memory: Memory) -> Descent:
        """Evaluate the starts and begin the first searches."""
        x = problems.start if box is None else box.project(problems.start)
        found = problems.at(x)
        gradient = found.gradients
        index = torch.arange(len(x), device=x.device)
        zeros = torch.zeros_like(found.values)
        search = Search.begin(found.values, zeros, zeros)
        count = torch.zeros_like(index)
        start = cls(
            problems, options, box, memory, index, count, x, found.values, gradient, x, search, count, count + 1
        )
        start.status = start.status_now(torch.full_like(found.values, torch.inf))
        start.set_out(torch.ones_like(index, dtype=torch.bool))
        return start

    def advance(self) -> None:
        """Evaluate every problem once."""
        options, box = self.options, self.box
        straight = self.x + self.search.step[:, None] * self.direction
        x = straight if box is None else box.project(straight)
        found = self.problems.at(x)
        value, gradient = found.values, found.gradients
        moving = self.direction if box is None else torch.where(x == straight, self.direction, 0.0)
        finite = torch.isfinite(gradient).all(-1)
        slope = torch.where(finite, inner(gradient, moving), torch.nan)
        expected = (self.search.step * self.search.slope).maximum(inner(self.gradient, x - self.x))
        taken = self.search.judge(value, slope, expected, options.c1, options.c2, self.problems.eps)
        stuck = ~taken & self.search.stuck()
        fall = (self.value - value) / self.value.abs().maximum(value.abs()).clamp_min(1)
        self.memory.learn(taken, x - self.x, gradient - self.gradient)
        self.x = chosen(taken, x, self.x)
        self.value = torch.where(taken, value, self.value)
        self.gradient = chosen(taken, gradient, self.gradient)
        self.nit, self.nfev = self.nit + taken, self.nfev + 1
        status = self.status_now(torch.where(taken, fall, torch.inf))
        # A search that found nothing along its direction tries the gradient before it gives up.
        self.status = torch.where(stuck & self.memory.fresh & (status == RUNNING), PRECISION.status, status)
        self.memory.forget(stuck)
        self.set_out(taken | stuck)

    def written(self) -> Written:
        """Return the columns of the result."""
        found = {"x": self.x, "fun": self.value, "jac": self.gradient}
        if isinstance(self.memory, DenseInverse):
            found["hess_inv"] = self.memory.matrix
        return {**found, "nit": self.nit, "nfev": self.nfev, "njev": self.nfev}

    def set_out(self, which: Tensor) -> None:
        """Compute new directions and begin new searches for some problems."""
        if not bool(which.any()):
            return
        free = None if self.box is None else ~self.box.holds(self.x, -self.gradient)
        direction = -self.memory.times(self.gradient, free)
        downhill = -self.gradient if free is None else torch.where(free, -self.gradient, 0.0)
        if self.box is not None:
            # An unknown at its bound stays there if the other unknowns would push it across.
            direction = torch.where(self.box.holds(self.x, direction), 0.0, direction)
        slope = inner(self.gradient, direction)
        # A direction that does not descend is due to rounding; restart along the gradient.
        lost = which & ~(slope < 0)
        self.memory.forget(lost)
        direction = chosen(lost, downhill, direction)
        slope = torch.where(lost, inner(self.gradient, downhill), slope)
        # Along the gradient the first step has length one, but no more than the gradient's length.
        first = torch.where(self.memory.fresh, (1 / length(direction)).clamp_max(1.0), 1.0)
        self.direction = chosen(which, direction, self.direction)
        self.search.anew(which, self.value, slope, first)

    def status_now(self, fall: Tensor) -> Tensor:
        """Return the numbers of the ends of problems, or `RUNNING`."""
        most = self.options.maxiter if self.options.maxiter is not None else 200 * self.x.shape[1]
        slope = self.gradient
        if self.box is not None:
            slope = self.x - self.box.project(self.x - slope)
        status = torch.full_like(self.nit, RUNNING)
        status[self.nit >= most] = ITERATIONS.status
        # With a tolerance of zero a constant value does not end the run: gradients may still fall.
        if self.options.ftol:
            status[fall <= self.options.ftol] = FLAT_NUMBER
        status[slope.abs().amax(-1) <= self.options.gtol] = CONVERGED.status
        status[~(torch.isfinite(self.value) & torch.isfinite(self.gradient).all(-1))] = NONFINITE.status
        return status


def bfgs(problems: Problems, options: BfgsOptions, box: Box | None) -> Descent:
    """Begin BFGS with dense inverse Hessians (n, n)."""
    return Descent.begin(problems, options, box, DenseInverse.of(problems.start))


def l_bfgs_b(problems: Problems, options: LbfgsbOptions, box: Box | None) -> Descent:
    """Begin L-BFGS with bounds, from the last pairs of steps and changes of gradients."""
    return Descent.begin(problems, options, box, LimitedMemory.of(problems.start, options.maxcor))
