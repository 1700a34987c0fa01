"""Explicit Runge-Kutta steps of adaptive size, which are constants of the derivatives.

Source: E. Hairer, S. P. Nørsett & G. Wanner, *Solving Ordinary Differential Equations I*, 2nd ed., sections II.4
(first step, error), IV.2 of volume II (PI control), and II.10 (error of DOP853).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import tensors_in
from hodiff.errors import ConvergenceError, InputError
from hodiff.recompute.checkpoint import checkpointed
from hodiff.torch_internals.autograd.differentiation import are_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

# The classes of scipy.integrate that hold the coefficients.
METHODS = {"dopri5": "RK45", "dop853": "DOP853", "bosh3": "RK23"}
State = Sequence[Tensor]
# Start and size of a step, relative to the interval between two times.
Share = tuple[float, float]
# Largest motion of a state at rest in one step, in tolerances.
_REST = 100.0


@dataclass(frozen=True)
class Tableau:
    """Coefficients of an embedded pair; the slope at the end of a step is a stage of the error estimates."""

    rows: list[list[float]]
    nodes: list[float]
    weights: list[float]
    # One estimate, or those of orders 5 and 3 in DOP853.
    errors: list[list[float]]
    # Order of the error of one step.
    order: int


@cache
def tableau(method: str) -> Tableau:
    """Return the coefficients of a method."""
    from scipy import integrate

    kind = getattr(integrate, METHODS[method])
    errors = [kind.E5, kind.E3] if method == "dop853" else [kind.E]
    rows = [row[:i].tolist() for i, row in enumerate(kind.A)]
    order = kind.error_estimator_order + 1
    return Tableau(rows, kind.C.tolist(), kind.B.tolist(), [each.tolist() for each in errors], order)


@dataclass(frozen=True)
class Problem:
    """The equation y' = rates(t, y, params) of the flat leaves of a state, and how to solve it.

    Attributes:
        rates: Slope of each leaf.
        method: A name in `METHODS`.
        rtol: Error of a step relative to an element of the state.
        atol: Absolute error of a step, for leaves of scale 1.
        step_size: Fixed size of steps, or None.
        max_steps: Maximum number of steps, including rejected ones.
        scales: Scale of each leaf.
        passive: Number of leaves, the last ones, that the slopes do not depend on.
        finish: Converts the states found before an error to a result for the user.
        is_adjoint: Whether it is an adjoint equation, which also solves the state backwards.
        held: Context in which many calls of `rates` are faster.
    """

    rates: Callable[[Any, State, Any], State]
    method: str
    rtol: float
    atol: float
    step_size: float | None
    max_steps: int
    scales: tuple[float, ...]
    passive: int = 0
    finish: Callable[[Sequence[State]], Any] = lambda _: None
    is_adjoint: bool = False
    held: Callable[[], AbstractContextManager[Any]] = nullcontext

    def size(self, errors: State, *states: State) -> float:
        """Largest error as a multiple of the tolerance, over all elements and rows of batches."""
        largest = 0.0
        with torch.no_grad():
            for error, scale, *values in zip(errors, self.scales, *states, strict=True):
                if error.numel():
                    reach = torch.stack([each.detach().abs() for each in values]).amax(0)
                    ratio = (error.detach().abs() / (self.atol * scale + self.rtol * reach)).amax()
                    found = float(numbers_in(ratio).max())
                    largest = max(largest, found if math.isfinite(found) else math.inf)
        return largest


def stack(states: Sequence[State]) -> list[Tensor]:
    """Stack the states at some times, leaf by leaf."""
    return [torch.stack(each) for each in zip(*states, strict=True)]


def integrate(
    problem: Problem, times: Tensor, y: State, params: Any, *, record: bool, steps_are_differentiated: bool = True
) -> Integration:
    """Solve an equation from the first time through all others; without `record`, on constants."""
    run = Integration(problem, times, y, params, record, steps_are_differentiated)
    with problem.held():
        run.solve()
    return run


class Integration:
    """A solution from the first to the last time.

    Attributes:
        states: The states at the times reached.
        shares: The accepted steps between each pair of times.
    """

    def __init__(self, problem: Problem, times: Tensor, y: State, params: Any, record: bool, differentiated: bool):
        self._rates, self._record = problem.rates, record
        # Closed-over tensors show in the first slope.
        self._may_be_differentiated = differentiated
        self._differentiated = differentiated and are_differentiated(tensors_in([times, y, params]))
        if not record:
            y = [each.detach() for each in y]
        self.problem, self.times, self.params = replace(problem, rates=self._slope), times, params
        self.places = numbers_in(times).astype("float64").tolist()
        self.states: list[State] = [y]
        self.shares: list[list[Share]] = []
        self._tried = 0
        self._error_before = 1.0

    def _slope(self, t: Any, y: State, params: Any) -> State:
        found = self._rates(t, y, params)
        if self._may_be_differentiated and not self._differentiated:
            self._differentiated = are_differentiated(found)
        return found if self._record else [each.detach() for each in found]

    def solve(self) -> None:
        """Integrate through all times; the sizes of steps are chosen by the numbers alone."""
        if len(self.places) == 1:
            return
        (y,), problem = self.states, self.problem
        slope = problem.rates(self.times[0], y, self.params)
        if not all(math.isfinite(problem.size(each, y)) for each in (y, slope)):
            raise InputError(
                f"odeint: y0 or f: expected finite numbers at the first time, {self.places[0]:g}, got infinite ones "
                "or NaN."
            )
        h = problem.step_size or max(self._first_step(y, slope), 10 * self._least_step(0))
        for k in range(len(self.places) - 1):
            y, slope, h = self._interval(k, y, slope, h)
            self.states.append(y)

    def _least_step(self, k: int) -> float:
        """Distance below which times between two given ones are equal up to rounding."""
        return 4 * torch.finfo(self.times.dtype).eps * max(map(abs, self.places[k : k + 2]))

    def _interval(self, k: int, y: State, slope: State, h: float) -> tuple[State, State, float]:
        """Step from one time to the next; return state, slope and the size of the next step."""
        problem, order = self.problem, tableau(self.problem.method).order
        size = abs(self.places[k + 1] - self.places[k])
        if problem.step_size is not None:
            h = size / math.ceil(size / problem.step_size * (1 - 1e-9))
        least = self._least_step(k)
        place, most = 0.0, 10.0
        shares: list[Share] = []
        while place < size:
            remaining = size - place
            step = remaining if h >= 0.999 * remaining else h
            self._tried += 1
            if self._tried > problem.max_steps or step < min(least, remaining):
                raise self._stopped(k, place, step)
            share = (place / size, step / size)
            after, slopes = self._step(k, share, y, slope)
            error = 0.0 if problem.step_size is not None else _error(problem, step, y, after, slopes)
            if error <= 1 and problem.step_size is None and self._is_at_rest(y, after):
                error = max(error, self._error_nearby(k, share, step, y, after, slopes))
            if error > 1:
                h = step * (0.1 if math.isinf(error) else max(0.2, 0.9 * error ** (-1 / order)))
                most = 1.0
                continue
            if problem.step_size is None:
                error = max(error, 1e-8)
                factor = 0.9 * error ** (-0.85 / order) * self._error_before ** (0.2 / order)
                # A step that was cut at a time says little about the next one.
                h = max(h if step < h and most > 1 else 0.0, step * min(most, max(0.2, factor)))
                self._error_before, most = max(error, 1e-4), 10.0
            elif not math.isfinite(problem.size(after, after)):
                raise self._stopped(k, place, None)
            shares.append(share)
            place = size if step == remaining else place + step
            y, slope = after, slopes[-1]
        self.shares.append(shares)
        return y, slope, h

    def _step(self, k: int, share: Share, y: State, slope: State) -> tuple[State, list[State]]:
        return _step(self.problem, self.times[k], self.times[k + 1], share, y, slope, self.params)

    def _is_at_rest(self, y: State, after: State) -> bool:
        """Whether the state has no error to choose steps by, but its derivatives have."""
        moved = [b - a for a, b in zip(y, after, strict=True)]
        return self._differentiated and self.problem.size(moved, y, after) <= _REST

    def _error_nearby(self, k: int, share: Share, h: float, y: State, after: State, slopes: Sequence[State]) -> float:
        """Estimate of the error in the distance to a solution that begins nearby, as a multiple of rtol."""
        problem, start = self.problem, self.times[k] + share[0] * (self.times[k + 1] - self.times[k])
        absolute = replace(problem, atol=1.0, rtol=0.0)
        reach = max(0.03 * absolute.size(y, y), 1e4 * problem.atol)
        with torch.no_grad():
            # Irregular, so that the slope depends on it, whatever the equation conserves.
            first = [reach * torch.ones_like(x).cumsum(-1).sin() if x.ndim else torch.full_like(x, reach) for x in y]
            nearby = [x + d for x, d in zip(y, first, strict=True)]
            end, found = self._step(k, share, nearby, problem.rates(start, nearby, self.params))
            last, *apart = (
                [a - b for a, b in zip(*pair, strict=True)]
                for pair in zip([end, *found], [after, *slopes], strict=True)
            )
        distance = max(absolute.size(first, first), absolute.size(last, last))
        if not math.isfinite(distance):
            return math.inf
        rtol = max(problem.rtol, 1e2 * torch.finfo(y[0].dtype).eps)
        return _error(replace(problem, rtol=rtol, atol=rtol * distance), h, first, last, apart)

    def _first_step(self, y: State, slope: State) -> float:
        """Size of the first step, from the first and second derivative of the solution."""
        problem, size = self.problem, abs(self.places[1] - self.places[0])
        sign = math.copysign(1.0, self.places[1] - self.places[0])
        d0, d1 = problem.size(y, y), problem.size(slope, y)
        h = min(size, 0.01 * d0 / d1 if min(d0, d1) > 1e-5 else 1e-6 * size)
        trial = [torch.add(each.detach(), k.detach(), alpha=sign * h) for each, k in zip(y, slope, strict=True)]
        found = problem.rates(self.times[0] + sign * h, trial, self.params)
        d2 = problem.size([a - b for a, b in zip(found, slope, strict=True)], y) / h
        curved = max(d1, d2)
        if not math.isfinite(curved):
            return h
        longest = (0.01 / curved) ** (1 / tableau(problem.method).order) if curved > 1e-15 else max(1e-6, h * 1e-3)
        return min(100 * h, longest, size)

    def _stopped(self, k: int, place: float, step: float | None) -> ConvergenceError:
        """Return the error of a stop; `step` is None for nonfinite numbers after a step of fixed size."""
        here = self.places[k] + math.copysign(place, self.places[k + 1] - self.places[k])
        if self.problem.is_adjoint:
            few = self._tried > self.problem.max_steps
            why = f"{self.problem.max_steps} steps have been tried" if few else f"the step would be {step or 0:.1e}"
            return ConvergenceError(
                f"odeint: memory='adjoint': the adjoint equation from t = {self.places[k]:g} back to "
                f"{self.places[k + 1]:g} stopped at t = {here:.10g}, as {why}: the equation forgets its past or is "
                "chaotic, so that the state backwards leaves the solution; pass more times in t"
                f"{', raise max_steps' if few else ''}, or pass memory='checkpoints'."
            )
        if step is None:
            why = "the state after the next step is not finite: take a smaller step_size, or None"
        elif self._tried > self.problem.max_steps:
            why = (
                f"{self.problem.max_steps} steps have been tried: raise max_steps or the tolerances; a stiff equation "
                "needs an implicit method"
            )
        else:
            why = (
                f"the step would be {step:.1e}: the solution is singular or not smooth there, f is not finite near it, "
                "or the tolerances are below rounding; end before, change variables, or raise the tolerances"
            )
        done = sum(map(len, self.shares))
        return ConvergenceError(
            f"odeint: stopped at t = {here:.10g}, after {done} steps to earlier times, as {why}.",
            self.problem.finish(self.states),
        )


def _step(
    problem: Problem, start: Tensor, end: Tensor, share: Share, y: State, slope: State, params: Any
) -> tuple[State, list[State]]:
    """Take a step that is a share of the interval between two times; return the state and all slopes."""
    table, length = tableau(problem.method), end - start
    t, h = start + share[0] * length, share[1] * length
    active = len(y) - problem.passive
    slopes = [slope]
    for row, node in zip(table.rows[1:], table.nodes[1:], strict=True):
        stage = [*_combined(y[:active], slopes, row, h), *y[active:]]
        slopes.append(problem.rates(t + node * h, stage, params))
    after = _combined(y, slopes, table.weights, h)
    slopes.append(problem.rates(t + h, after, params))
    return after, slopes


def _error(problem: Problem, h: float, y: State, after: State, slopes: Sequence[State]) -> float:
    """Estimate of the error of a step, as a multiple of the tolerance."""
    zeros = [torch.zeros_like(each) for each in y]
    sizes = [problem.size(_combined(zeros, slopes, weights, h), y, after) for weights in tableau(problem.method).errors]
    if len(sizes) == 1 or sizes[0] == 0 or not all(map(math.isfinite, sizes)):
        return sizes[0] if all(map(math.isfinite, sizes)) else math.inf
    fifth, third = sizes
    return fifth * fifth / math.hypot(fifth, 0.1 * third)


def _combined(y: State, slopes: Sequence[State], weights: Sequence[float], h: Any) -> list[Tensor]:
    """Add a combination of slopes to each leaf, with one operator for each."""
    found = []
    for i, leaf in enumerate(y):
        total = None
        for weight, slope in zip(weights, slopes, strict=False):
            if weight:
                total = slope[i] * weight if total is None else torch.add(total, slope[i], alpha=weight)
        found.append(leaf if total is None else leaf + h * total)
    return found


def by_checkpoints(problem: Problem, run: Integration, times: Tensor, y: State, params: Any) -> list[Tensor]:
    """Repeat the accepted steps of a run, and store the states after each √n of n steps."""
    length = max(1, math.ceil(math.sqrt(sum(map(len, run.shares)))))
    states = [y]
    for k, shares in enumerate(run.shares):
        for i in range(0, len(shares), length):
            piece = _Piece(problem, shares[i : i + length])
            y = checkpointed("odeint", piece, (times[k], times[k + 1], list(y), params), {})
        states.append(y)
    return stack(states)


@dataclass(frozen=True)
class _Piece:
    """Some steps between two times, as a function of what they depend on."""

    problem: Problem
    shares: list[Share]

    def __call__(self, start: Tensor, end: Tensor, y: State, params: Any) -> State:
        slope = self.problem.rates(start + self.shares[0][0] * (end - start), y, params)
        for share in self.shares:
            y, slopes = _step(self.problem, start, end, share, y, slope, params)
            slope = slopes[-1]
        return list(y)
