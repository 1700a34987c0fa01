"""The line search of Hager and Zhang, which takes approximate Wolfe conditions where values are equal to rounding.

Source: W. Hager & H. Zhang, "Algorithm 851: CG_DESCENT", ACM Trans. Math. Softw. 32 (2006), sections 2 to 4, whose
names of steps (B1, U3, S2, ...) stand in the comments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

# Of the paper: the size of an increase that may be rounding, and of a change so small that slopes tell more than
# values, both by the value; growth of what brackets; bisection; and by how much an interval is to shrink.
EPSILON, OMEGA, GROWTH, BISECTION, SHRINKAGE = 1e-6, 1e-3, 5.0, 0.5, 0.66
# How far a step goes back to where the function is finite.
RETREAT = 0.1
MOST = 60


@dataclass(frozen=True)
class Trial:
    """What is known of the function along the line at one step; `point` is the caller's."""

    step: float
    value: float
    slope: float
    point: Any = None

    @property
    def finite(self) -> bool:
        """Whether value and slope are numbers."""
        return math.isfinite(self.value) and math.isfinite(self.slope)


Trials = Generator[float, Trial, Any]


@dataclass(frozen=True)
class Wolfe:
    r"""When a step is good enough, of a line that begins at `start`.

    Attributes:
        start: The trial of step 0.
        decrease: By which part of the slope the value must fall, the paper's $\\delta$.
        curvature: Which part of the slope may be left, the paper's $\\sigma$.
    """

    start: Trial
    decrease: float = 0.1
    curvature: float = 0.9

    @property
    def ceiling(self) -> float:
        """The largest value that may be as low as the first but for rounding."""
        return self.start.value + EPSILON * abs(self.start.value)

    def low(self, trial: Trial) -> bool:
        """Whether the value is not higher than the first, but for rounding."""
        return trial.value <= self.ceiling

    def accepts(self, trial: Trial) -> bool:
        """Wolfe's conditions, or near the minimum the approximate ones (T1 and T2)."""
        first = self.start.slope
        if not trial.finite or trial.slope < self.curvature * first:
            return False
        if trial.value - self.start.value <= self.decrease * trial.step * first:
            return True
        near = abs(trial.value - self.start.value) <= OMEGA * abs(self.start.value)
        return near and self.low(trial) and trial.slope <= (2 * self.decrease - 1) * first


def line_search(evaluate: Callable[[float], Trial], wolfe: Wolfe, step: float = 1.0) -> Trial | None:
    """The first trial that is good enough, beginning with `step`; else the lowest below the start, else None."""
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


def _trials(wolfe: Wolfe, step: float) -> Trials:
    """Steps to look at, until the interval holds no number any more (L0 to L3)."""
    a, b = yield from _bracket(wolfe, step)
    while a.step < (a.step + b.step) / 2 < b.step:
        width = b.step - a.step
        a, b = yield from _secant_twice(wolfe, a, b)
        if b.step - a.step > SHRINKAGE * width:
            a, b = yield from _update(wolfe, a, b, (a.step + b.step) / 2)


def _bracket(wolfe: Wolfe, step: float) -> Trials:
    """An interval that begins low and falling, and ends rising."""
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
    """A smaller interval by the trial of a step inside."""
    if not a.step < step < b.step:  # U0
        return a, b
    trial = yield step
    if trial.slope >= 0:  # U1
        return a, trial
    if wolfe.low(trial):  # U2
        return trial, b
    return (yield from _bisect(wolfe, a, trial))


def _bisect(wolfe: Wolfe, a: Trial, b: Trial) -> Trials:
    """An interval between a low and a high trial (U3); not finite is high."""
    while a.step < (middle := (1 - BISECTION) * a.step + BISECTION * b.step) < b.step:
        trial = yield middle
        if trial.slope >= 0:
            return a, trial
        a, b = (trial, b) if wolfe.low(trial) else (a, trial)
    return a, b


def _secant_twice(wolfe: Wolfe, a: Trial, b: Trial) -> Trials:
    """An interval by secants of both ends (S1 to S4)."""
    c = _secant(a, b)
    left, right = yield from _update(wolfe, a, b, c)
    if c == right.step:
        return (yield from _update(wolfe, left, right, _secant(b, right)))
    if c == left.step:
        return (yield from _update(wolfe, left, right, _secant(a, left)))
    return left, right


def _secant(a: Trial, b: Trial) -> float:
    """Where the line through both slopes is zero; not a number where there is none."""
    rise = b.slope - a.slope
    return (a.step * b.slope - b.step * a.slope) / rise if rise else math.nan
