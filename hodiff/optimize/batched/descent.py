r"""Quasi-Newton methods for many problems at once; each round evaluates the next trial of every line search.

With bounds the steps are projected, $x(t) = P(x + t d)$. d is computed in the space of the unknowns that their
gradient does not hold at a bound.

Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., chapters 6 and 7; D. Bertsekas, SIAM J. Control
Optim. 20 (1982), for the projection; R. Byrd, P. Lu, J. Nocedal & C. Zhu, SIAM J. Sci. Comput. 16 (1995), for
termination.

Line searches of many problems, with one trial each in a round, by brackets for the weak Wolfe conditions.

$$ \varphi(t) \le \varphi(0) + c_1 t\, \varphi'(0), \qquad \varphi'(t) \ge c_2\, \varphi'(0) $$

A trial that violates the first condition becomes the bracket's upper end. A trial that violates the second becomes
the lower end. The bracket so closes on a step that satisfies both, even if bounds bend the line. If values differ
only by rounding, slopes decide.

Source: A. Lewis & M. Overton, Math. Program. 141 (2013), algorithm 2.6; W. Hager & H. Zhang, SIAM J. Optim. 16 (2005),
equation 4.1, for the approximate conditions; J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., equation 3.59.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hodiff.optimize.batched.batch import Box
from hodiff.optimize.batched.inverse_hessians import DenseInverse, LimitedMemory, Memory
from hodiff.optimize.batched.problems import Problems
from hodiff.optimize.batched.running_rows import RUNNING, Rows, Written, chosen, inner, length
from hodiff.optimize.method_options import COUNT, FRACTION, PAIRS, TOLERANCE
from hodiff.optimize.terminations import CONVERGED, ITERATIONS, NONFINITE, PRECISION, End

# Growth of steps without an upper end; smallest distance of a trial to the bracket's ends, relative to its width;
# every how many trials a bracket is halved; retreat to where the function is finite; most trials.
GROWTH, MARGIN, HALVED, RETREAT, MOST = 2.5, 0.1, 3, 0.1, 60


@dataclass
class Search(Rows):
    """State of the line searches.

    Attributes:
        value: Values at step 0, (b,).
        slope: Slopes along the lines at step 0.
        step: Steps of the next trials.
        low: Step, value and slope at the lower ends, (b, 3).
        high: Step, value and slope at the upper ends; the step is infinite if there is no upper end.
        trials: Numbers of trials.
    """

    value: Tensor
    slope: Tensor
    step: Tensor
    low: Tensor
    high: Tensor
    trials: Tensor

    @classmethod
    def begin(cls, value: Tensor, slope: Tensor, step: Tensor) -> Search:
        """Begin searches with a first step."""
        low = torch.stack([torch.zeros_like(value), value, slope], 1)
        return cls(value, slope, step, low, torch.full_like(low, torch.inf), torch.zeros_like(value, dtype=torch.int64))

    def anew(self, which: Tensor, value: Tensor, slope: Tensor, step: Tensor) -> None:
        """Restart the searches of some problems."""
        other = Search.begin(value, slope, step)
        for name in ("value", "slope", "step", "low", "high", "trials"):
            setattr(self, name, chosen(which, getattr(other, name), getattr(self, name)))

    def judge(self, value: Tensor, slope: Tensor, expected: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        """Mark trials that end their search; others update brackets. `expected` are changes of linear functions."""
        finite = torch.isfinite(value) & torch.isfinite(slope)
        lower = value <= self.value + c1 * expected.clamp_max(0)
        noise = 10 * eps * self.value.abs()
        same = (value <= self.value + noise) & (slope <= (2 * c1 - 1) * self.slope)
        low = finite & (lower | same)
        steep = slope < c2 * self.slope
        trial = torch.stack([self.step, value, slope], 1)
        self.low = chosen(low & steep, trial, self.low)
        self.high = chosen(~low, trial, self.high)
        self.trials = self.trials + 1
        self.step = self._next()
        return low & ~steep

    def stuck(self) -> Tensor:
        """Mark the searches whose bracket is closed or whose trials are used up."""
        low, high = self.low[:, 0], self.high[:, 0]
        closed = torch.isfinite(high) & (high - low <= 4 * torch.finfo(high.dtype).eps * high)
        return closed | (self.trials >= MOST)

    def _next(self) -> Tensor:
        """Minimise the cubic through the bracket's ends; without an upper end, grow the step."""
        (a, value_a, slope_a), (b, value_b, slope_b) = self.low.T, self.high.T
        width = b - a
        mean = slope_a + slope_b - 3 * (value_b - value_a) / width
        root = (mean.square() - slope_a * slope_b).sqrt()
        least = b - width * (slope_b + root - mean) / (slope_b - slope_a + 2 * root)
        halved = (self.trials % HALVED == 0) | ~torch.isfinite(least)
        inside = torch.where(halved, a + width / 2, least.maximum(a + MARGIN * width).minimum(b - MARGIN * width))
        inside = torch.where(torch.isfinite(value_b) & torch.isfinite(slope_b), inside, a + RETREAT * width)
        return torch.where(torch.isfinite(b), inside, GROWTH * self.step)


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
