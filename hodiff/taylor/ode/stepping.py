"""Steps of a Taylor series method from the first time to the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hodiff.common.trees import unflatten
from hodiff.errors import ConvergenceError, InputError
from hodiff.recompute.checkpoint import checkpoint
from hodiff.taylor.jets import tensor_of
from hodiff.taylor.ode.field import Columns, Field
from hodiff.taylor.ode.solution import OdeSolution, Step, evaluate, slopes
from hodiff.taylor.ode.step_size import Tolerance, norm, proposed, shortened


class Integration:
    """A running integration; places are the signed distances of times from the first, `dense` keeps all series."""

    def __init__(
        self,
        field: Field,
        times: Any,
        places: Sequence[float],
        tolerance: Tolerance,
        order: int | None,
        step_size: float | None,
        max_steps: int,
        *,
        dense: bool,
    ):
        self.field, self.times, self.dense = field, times, dense
        self.tolerance, self.order, self.step_size, self.max_steps = tolerance, order, step_size, max_steps
        self.sign = -1.0 if places[-1] < 0 else 1.0
        self.places = [abs(place) for place in places]
        self.first = float(tensor_of(times[0]).detach())
        self.found: list[list[Any]] = []
        self.steps: list[Step] = []
        self.rejected = self.evaluations = 0

    def solved(self, y: list[Any]) -> OdeSolution:
        """Integrate to the last time."""
        start, end = 0.0, self.places[-1]
        slope = self._slope(0.0, y)
        if math.isinf(norm(y)) or math.isinf(norm(slope)):
            raise InputError(
                f"{self.field.caller}: y0 or f: expected finite numbers at the first time, {self.first:g}, got "
                "infinite ones or NaN."
            )
        self.found.append([each[None] for each in y])
        count = 1
        while start < end:
            columns, h, y, slope = self._step(start, end, y, slope)
            after = self._end_of(start, h)
            reached = self._reached(count, after)
            if reached:
                since = self.times[count : count + reached] - self.times[0] - self.sign * start
                self.found.append(evaluate(columns, since))
            count += reached
            kept = columns if self.dense else []
            self.steps.append(Step(self.sign * start, self.sign * h, len(columns[0]) - 1, kept))
            start = after
        return self._solution()

    def recomputed(self, y: list[Any]) -> OdeSolution:
        """Integrate, and store only the states at the ends of steps for derivatives, which compute the series again."""
        with torch.no_grad():
            # Sizes and orders of steps are constants.
            self.solved([tensor_of(each).detach() for each in y])
        self.found, start, count = [[each[None] for each in y]], 0.0, 1
        for step in self.steps:
            after = self._end_of(start, abs(step.size))
            reached = self._reached(count, after)
            times = self.times[count : count + reached]
            inner, y = checkpoint(partial(_series_step, self.field, step), self.times[0], times, *y)
            self.found += [inner] * bool(reached)
            start, count = after, count + reached
        return self._solution()

    def _end_of(self, start: float, h: float) -> float:
        """Return the end of a step; the last step has exactly the last time's place."""
        end = self.places[-1]
        return end if h >= end - start else start + h

    def _reached(self, count: int, after: float) -> int:
        """Return how many times after the first `count` a step reaches."""
        return sum(place <= after for place in self.places[count:])

    def _slope(self, place: float, y: Sequence[Any]) -> list[Any]:
        self.evaluations += 1
        return self.field.value(self.times[0] + self.sign * place, y)

    def _step(
        self, start: float, end: float, y: list[Any], slope: list[Any]
    ) -> tuple[Columns, float, list[Any], list[Any]]:
        """Take the longest step that satisfies the equation at its end; return series, size, end state and slope."""
        size = norm(y)
        order = self.order or self.tolerance.order(size)
        columns = self.field.growing(self.times[0] + self.sign * start, y, slope, order)
        self.evaluations += order - 1
        allowed = self.tolerance.at(size)
        h = self.step_size or proposed(columns, max(allowed, self.tolerance.rounding * size))
        # Times that differ by less are equal up to rounding. A step that ends this near to the end is the last step.
        least = 4 * self.tolerance.rounding * max(end, abs(self.first))
        if end - start - h <= 4 * least:
            h = end - start
        derivative = slopes(columns)
        while True:
            too_short = h <= least and h < end - start
            if too_short or len(self.steps) + self.rejected >= self.max_steps:
                raise self._stopped(start, h, size, too_short)
            after = evaluate(columns, self.sign * h)
            after_slope = self._slope(start + h, after)
            if self.step_size is not None:
                if math.isinf(norm(after)) or math.isinf(norm(after_slope)):
                    raise self._stopped(start, h, size, None)
                break
            error = h * _distance(evaluate(derivative, self.sign * h), after_slope) / (order + 1)
            # A shorter step does not reduce the rounding error of the series' sum.
            allowed_here = allowed + 16 * self.tolerance.rounding * (size + h * norm(after_slope))
            if error <= allowed_here:
                break
            self.rejected += 1
            h = shortened(h, error, allowed_here, order)
        return columns, h, after, after_slope

    def _stopped(self, start: float, h: float, size: float, too_short: bool | None) -> ConvergenceError:
        """Return the error of a stop; `too_short` is None for nonfinite numbers after a step of fixed size."""
        why, remedy = {
            True: (
                f"the step would be {h:.1e}",
                "the solution is singular or not smooth there, or f is not finite near it; end before, or change "
                "variables",
            ),
            False: (
                f"{self.max_steps} steps have been tried",
                "raise max_steps or the tolerances; a stiff equation needs an implicit method",
            ),
            None: ("the state after the next step is not finite", "take a smaller step_size, or None"),
        }[too_short]
        return ConvergenceError(
            f"{self.field.caller}: stopped at t = {self.first + self.sign * start:.10g}, with a state of size "
            f"{size:.3g}, after {len(self.steps)} steps, as {why}: {remedy}.",
            self._solution(),
        )

    def _solution(self) -> OdeSolution:
        """Return the solution reached so far."""
        leaves = [torch.cat(parts) for parts in zip(*self.found, strict=True)]
        return OdeSolution(
            t=self.times[: len(tensor_of(leaves[0]))],
            y=unflatten(leaves, self.field.spec),
            step_sizes=[each.size for each in self.steps],
            orders=[each.order for each in self.steps],
            rejected=self.rejected,
            evaluations=self.evaluations,
            _steps=self.steps,
            _spec=self.field.spec,
        )


def _series_step(field: Field, step: Step, first: Any, times: Any, *y: Any) -> tuple[list[Any], list[Any]]:
    """Return the states at some times, and at the end of a step, by the series of the step."""
    slope = field.value(first + step.start, y)
    columns = field.growing(first + step.start, y, slope, step.order)
    return evaluate(columns, times - first - step.start) if len(times) else [], evaluate(columns, step.size)


def _distance(a: Sequence[Any], b: Sequence[Any]) -> float:
    return norm([tensor_of(x).detach() - tensor_of(y).detach() for x, y in zip(a, b, strict=True)])
