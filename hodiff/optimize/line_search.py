"""Line search of Hager and Zhang, with approximate Wolfe conditions where values differ only by rounding.

Source: W. Hager & H. Zhang, "Algorithm 851: CG_DESCENT", ACM Trans. Math. Softw. 32 (2006), sections 2 to 4. The
comments use the names of its steps (B1, U3, S2, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hodiff.optimize.recorded_point import Evaluation

# Constants of the paper: the relative increase that may be rounding, the relative change below which slopes are
# more reliable than values, the growth of the bracket, bisection, and the required shrinkage of an interval.
EPSILON, OMEGA, GROWTH, BISECTION, SHRINKAGE = 1e-6, 1e-3, 5.0, 0.5, 0.66
# Factor by which a step shrinks until the function is finite.
RETREAT = 0.1
MOST = 60


@dataclass(frozen=True)
class Trial:
    """Value and slope of the function at one step along the line; `point` belongs to the caller."""

    step: float
    value: float
    slope: float
    point: Any = None

    @property
    def finite(self) -> bool:
        """Whether value and slope are finite."""
        return math.isfinite(self.value) and math.isfinite(self.slope)


Trials = Generator[float, Trial, Any]


@dataclass(frozen=True)
class Wolfe:
    r"""Conditions for accepting a step along a line that begins at `start`.

    Attributes:
        start: Trial of step 0.
        decrease: Fraction of the slope by which the value must fall, the paper's $\\delta$.
        curvature: Fraction of the slope that may remain, the paper's $\\sigma$.
    """

    start: Trial
    decrease: float = 0.1
    curvature: float = 0.9

    @property
    def ceiling(self) -> float:
        """Largest value that exceeds the first only by rounding."""
        return self.start.value + EPSILON * abs(self.start.value)

    def low(self, trial: Trial) -> bool:
        """Whether the value exceeds the first at most by rounding."""
        return trial.value <= self.ceiling

    def accepts(self, trial: Trial) -> bool:
        """Whether the trial meets Wolfe's conditions, or near the minimum the approximate ones (T1 and T2)."""
        first = self.start.slope
        if not trial.finite or trial.slope < self.curvature * first:
            return False
        if trial.value - self.start.value <= self.decrease * trial.step * first:
            return True
        near = abs(trial.value - self.start.value) <= OMEGA * abs(self.start.value)
        return near and self.low(trial) and trial.slope <= (2 * self.decrease - 1) * first


def line_search(evaluate: Callable[[float], Trial], wolfe: Wolfe, step: float = 1.0) -> Trial | None:
    """Return the first accepted trial, beginning with `step`; else the lowest below the start, else None."""
    lowest: Trial | None = None
    trials = _trials(wolfe, step)
    step = next(trials)
    for _ in range(MOST):
        trial = evaluate(step)
        if wolfe.accepts(trial):
            return trial
        if trial.finite and trial.value < (wolfe.start if lowest is None else lowest).value:
            lowest = trial
        try:
            step = trials.send(trial)
        except StopIteration:
            break
    return lowest


class Recorder(Protocol):
    """Function whose points hold value and gradient."""

    def point(self, x: Any) -> Evaluation:
        """Evaluate the function at a float64 vector."""


def search_along(objective: Recorder, x: Tensor, direction: Tensor, wolfe: Wolfe, step: float = 1.0) -> Trial | None:
    """Search from x along a direction; the trials hold the points, without their graphs."""

    def evaluate(step: float) -> Trial:
        point = objective.point(torch.add(x, direction, alpha=step))
        if not point.finite:
            return Trial(step, point.value, math.nan)
        trial = Trial(step, point.value, float(torch.dot(point.slope, direction)), point)
        point.release()
        return trial

    return line_search(evaluate, wolfe, step)


def _trials(wolfe: Wolfe, step: float) -> Trials:
    """Generate trial steps until no number is left within the interval (L0 to L3)."""
    a, b = yield from _bracket(wolfe, step)
    while a.step < (a.step + b.step) / 2 < b.step:
        width = b.step - a.step
        a, b = yield from _secant_twice(wolfe, a, b)
        if b.step - a.step > SHRINKAGE * width:
            a, b = yield from _update(wolfe, a, b, (a.step + b.step) / 2)


def _bracket(wolfe: Wolfe, step: float) -> Trials:
    """Find an interval that begins low and falling, and ends rising."""
    low, trial = wolfe.start, (yield step)
    while not trial.finite:
        step *= RETREAT
        trial = yield step
    while trial.slope < 0:
        if not wolfe.low(trial):  # B2
            return (yield from _bisect(wolfe, wolfe.start, trial))
        low = trial
        further = yield GROWTH * trial.step  # B3
        while not further.finite:
            further = yield (low.step + RETREAT * (further.step - low.step))
        trial = further
    return low, trial  # B1


def _update(wolfe: Wolfe, a: Trial, b: Trial, step: float) -> Trials:
    """Shrink the interval by a trial step inside it."""
    if not a.step < step < b.step:  # U0
        return a, b
    trial = yield step
    if trial.slope >= 0:  # U1
        return a, trial
    if wolfe.low(trial):  # U2
        return trial, b
    return (yield from _bisect(wolfe, a, trial))


def _bisect(wolfe: Wolfe, a: Trial, b: Trial) -> Trials:
    """Bisect between a low and a high trial (U3); values that are not finite count as high."""
    while a.step < (middle := (1 - BISECTION) * a.step + BISECTION * b.step) < b.step:
        trial = yield middle
        if trial.slope >= 0:
            return a, trial
        a, b = (trial, b) if wolfe.low(trial) else (a, trial)
    return a, b


def _secant_twice(wolfe: Wolfe, a: Trial, b: Trial) -> Trials:
    """Shrink the interval by secants of both ends (S1 to S4)."""
    c = _secant(a, b)
    left, right = yield from _update(wolfe, a, b, c)
    if c == right.step:
        return (yield from _update(wolfe, left, right, _secant(b, right)))
    if c == left.step:
        return (yield from _update(wolfe, left, right, _secant(a, left)))
    return left, right


def _secant(a: Trial, b: Trial) -> float:
    """Return the zero of the line through both slopes, or NaN if the slopes are equal."""
    rise = b.slope - a.slope
    return (a.step * b.slope - b.step * a.slope) / rise if rise else math.nan
