"""Derivatives by every route, order by order: differences of an order judge the next order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, Outcome, attempt
from hodiff.checks.comparisons.judgement import exact, is_settled, judge, scale_of
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalarize import draw_normal
from hodiff.checks.oracles.compositions import along_directions, derivative, route_names
from hodiff.checks.oracles.finite_differences import FARTHER, LEVELS, DifferenceEstimate, extrapolate
from hodiff.checks.progress import advance
from hodiff.checks.report.data import Entry

Loss = Callable[[Tensor], Tensor]
# (t, v_1, ..., v_{k-1}) -> D^k loss(t)[v_1, ..., v_{k-1}, .], or the loss itself at k = 0
Trusted = Callable[..., Tensor]

# Up to this many numbers derivatives are taken along the basis; beyond, along this many random directions, which
# involve every element. SciPy's evaluations grow with the square of this number.
DIRECTIONS = 2
# Time limit of differences of differences, which judge the order above if no route is right. They repeat the order's
# own differences for some forty steps.
SECONDS = 10.0
_STEPS = 2 * LEVELS + 1
# Number of restarts of differences that do not settle, with far smaller steps in each restart, down to 1e-15.
_RESTARTS = 3
# Largest relative error with which the result of a restart counts.
_EXACT = 1e-5
_DOUBLE = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Level:
    """Derivatives of one order at a point, by all routes.

    Attributes:
        order: The order k.
        tuples: The tuples of k - 1 directions along which the derivative was taken.
        free: The directions, (q, m), along which routes without a reverse pass take the last index.
        outcomes: By route, the derivatives of shape (len(tuples), m), or the failure; (len(tuples), q) for routes
            without a reverse pass.
        differences: The derivatives by differences of the order below; (1, q) at order 1.
        truth: The first route that agrees with the differences, else the differences.
        trusted: The function that computes the truth at any point.
        lower: The largest derivative of lower orders, at whose rounding level a vanishing derivative is compared.
        eps: The rounding of the problem.
        above: Reason for a missing level above.
    """

    order: int
    tuples: tuple[tuple[Tensor, ...], ...]
    free: Tensor
    outcomes: dict[str, Outcome]
    differences: DifferenceEstimate
    truth: DifferenceEstimate
    trusted: Trusted
    lower: float
    eps: float
    above: str = "the order below has no settled value"

    @property
    def raises(self) -> bool:
        """Whether every route raises."""
        return _all_raise(self.outcomes)

    @property
    def settled(self) -> bool:
        """Whether the truth is exact enough to judge by."""
        return is_settled(self.truth, self.lower, self.eps)

    @property
    def scale(self) -> float:
        """The size that errors are relative to."""
        return scale_of(self.truth.value, self.lower, self.eps)

    def compare(self, route: str, quantity: str, outcome: Outcome, reference: DifferenceEstimate, **how: Any) -> Entry:
        """Compare a route with a reference; if only one of them is along `free`, project the other."""
        how = {"lower": self.lower, "eps": self.eps} | how
        if isinstance(outcome, Tensor) and outcome.shape != reference.value.shape:
            if outcome.shape[-1] == self.free.shape[1]:
                outcome = outcome @ self.free.T
            else:
                stretch = max(1.0, float(self.free.abs().sum(1).max()))
                value = reference.value @ self.free.T
                reference = replace(reference, value=value, error=reference.error * stretch)
        return judge(route, self.order, quantity, outcome, reference, **how)


def climb(
    problem: ScalarProblem,
    loss: Loss,
    order: int,
    generator: torch.Generator,
    *,
    by_differences: bool = True,
) -> list[Level]:
    """Return the levels of a loss at the origin, up to an order or the last order with a truth."""
    levels: list[Level] = []
    trusted: Trusted = loss
    lower, seconds = _size(loss, problem), 0.0
    for k in range(1, order + 1):
        at = _Directions.of(problem, k, generator)
        outcomes = _outcomes(problem, loss, at)
        # If every route raises there is nothing to compare, and differences of differences are not needed.
        silent = k > 1 and _all_raise(outcomes)
        if seconds > SECONDS and not silent:
            levels[-1] = replace(levels[-1], above=f"differences of differences would take some {seconds:.0f} s")
            break
        start = time.perf_counter()
        level = _level(problem, loss, trusted, at, lower, outcomes, silent=silent)
        elapsed = time.perf_counter() - start
        levels.append(level)
        # If no route agrees with the differences, the next order takes differences of differences, at their cost.
        guessed = level.truth is level.differences
        if (guessed and not by_differences) or not (level.settled or silent):
            break
        # The next order takes differences along every element of the point; this order took them along a few.
        wider = len(problem.point) / len(at.free) if k == 1 else 1 / len(at.tuples)
        seconds = seconds * _STEPS if silent else guessed * elapsed * wider * len(at.free) * _STEPS
        trusted, lower = level.trusted, max(lower, level.scale)
    return levels


def any_raises(problem: ScalarProblem, loss: Loss, order: int, generator: torch.Generator) -> bool:
    """Whether a route raises at any order."""
    orders = (_Directions.of(problem, k, generator) for k in range(1, order + 1))
    return any(isinstance(each, Failure) for at in orders for each in _outcomes(problem, loss, at).values())


def _size(loss: Loss, problem: ScalarProblem) -> float:
    """Return the loss at the point; if it is zero, a step away, as zero does not show the size of derivatives."""
    here = float(loss(problem.point).detach().abs())
    if here:
        return here
    # Steps are unequal, as equal steps would stay at singular matrices or equal vectors, where much vanishes.
    steps = torch.rand(
        problem.point.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
    )
    beside = attempt(loss, problem.point + problem.step * steps.to(problem.point.device))
    size = 0.0 if isinstance(beside, Failure) else float(beside.detach().abs())
    return size if math.isfinite(size) else 0.0


def evaluate_route(
    loss: Loss, route: str, point: Tensor, tuples: tuple[tuple[Tensor, ...], ...], free: Tensor | None = None
) -> Tensor:
    """Return a route's derivative at all tuples of directions, stacked."""
    advance(route)
    # A route without a reverse pass has no free index: its last direction runs over the rows of `free`.
    if free is None or "reverse" in route:
        function = derivative(loss, route)
        return torch.stack([function(point, *directions) for directions in tuples]).detach()
    along = along_directions(loss, route)
    rows = [torch.stack([along(point, *directions, last) for last in free]) for directions in tuples]
    return torch.stack(rows).detach()


def against_differences(levels: list[Level], order: int, quantity: str = "vs differences") -> Iterator[Entry]:
    """Compare each route with differences of the order below."""
    for level in levels:
        for route, outcome in level.outcomes.items():
            yield level.compare(route, quantity, outcome, level.differences)
    for k in range(len(levels) + 1, order + 1):
        yield Entry("all routes", k, quantity, None, None, "skipped", levels[-1].above)


def between_routes(levels: list[Level]) -> Iterator[Entry]:
    """Compare each route with the trusted route, up to rounding, which is finer than differences."""
    for level in levels:
        for route, outcome in level.outcomes.items():
            if level.truth is level.differences:
                yield Entry(route, level.order, "vs routes", None, None, "skipped", "no route is trusted")
            else:
                yield level.compare(route, "vs routes", outcome, level.truth)


def in_own_dtype(problem: ScalarProblem, loss: Loss, levels: list[Level], quantity: str) -> Iterator[Entry]:
    """Compare routes in the inputs' own dtypes with the float64 truth, if the route is right in float64."""
    for level in levels:
        for route, double in level.outcomes.items():
            if level.compare(route, quantity, double, level.truth).failed:
                yield Entry(route, level.order, quantity, None, None, "skipped", "no float64 value")
                continue
            outcome = attempt(evaluate_route, loss, route, problem.point, level.tuples, level.free)
            yield level.compare(route, quantity, outcome, level.truth, eps=problem.eps, wrong="imprecise")


@dataclass(frozen=True)
class _Directions:
    """Directions along which the derivative of an order is taken; without directions, it is the gradient."""

    order: int
    tuples: tuple[tuple[Tensor, ...], ...]
    free: Tensor

    @staticmethod
    def of(problem: ScalarProblem, order: int, generator: torch.Generator) -> _Directions:
        m, device = len(problem.point), problem.point.device
        basis = torch.eye(m, dtype=torch.float64, device=device)
        few = basis if m <= DIRECTIONS else _short(draw_normal((DIRECTIONS, m), generator)).to(device)
        if order == 1:
            return _Directions(1, ((),), few)
        if order == 2:
            return _Directions(2, tuple((v,) for v in few), few)
        tuples = tuple(tuple(v.to(device) for v in draw_normal((order - 1, m), generator)) for _ in range(2))
        return _Directions(order, tuples, few)


def _short(directions: Tensor) -> Tensor:
    """Scale each direction by a power of two to a length near one, so that rounding is not amplified."""
    return directions * torch.exp2(-directions.norm(dim=1, keepdim=True).log2().round())


def _outcomes(problem: ScalarProblem, loss: Loss, at: _Directions) -> dict[str, Any]:
    return {
        route: attempt(evaluate_route, loss, route, problem.point, at.tuples, at.free)
        for route in route_names(at.order)
    }


def _all_raise(outcomes: Mapping[str, Outcome]) -> bool:
    return all(isinstance(outcome, Failure) for outcome in outcomes.values())


def _level(
    problem: ScalarProblem,
    loss: Loss,
    below: Trusted,
    at: _Directions,
    lower: float,
    outcomes: dict[str, Any],
    *,
    silent: bool,
) -> Level:
    """Return the level of the routes' outcomes; a silent level has no differences."""
    point, eps, k = problem.point, problem.eps, at.order
    basis = torch.eye(len(point), dtype=point.dtype, device=point.device)
    if silent:
        nothing = torch.full((len(at.tuples), len(point)), math.nan, device="cpu").to(point)
        differences = DifferenceEstimate(nothing, math.inf, 0.0, smooth=True)
    else:
        differences = _differences(below, point, at.tuples, at.free, problem)

    def by_differences(t: Tensor, *directions: Tensor) -> Tensor:
        return _differences(below, t, (directions,), basis, problem).value[0]

    def level(differences: DifferenceEstimate) -> Level:
        unknown = Level(k, at.tuples, at.free, outcomes, differences, differences, by_differences, lower, eps)
        for route, outcome in outcomes.items():
            if unknown.compare(route, "", outcome, differences).status == "ok":
                return replace(unknown, truth=exact(outcome), trusted=derivative(loss, route))
        return unknown

    found = level(differences)
    unknown = [found.compare(route, "", each, differences).status == "non-smooth" for route, each in outcomes.items()]
    if silent or eps > _DOUBLE or not any(unknown):
        return found
    # Much smaller steps do not resolve rounded changes, so they count only if they are exact and a route agrees.
    for part in range(1, _RESTARTS + 1):
        near = _differences(below, point, at.tuples, at.free, replace(problem, reach=problem.reach * FARTHER**part))
        nearer = level(near)
        if nearer.truth is not near and near.error <= _EXACT * nearer.scale:
            return nearer
    return found


def _differences(
    below: Trusted, point: Tensor, tuples: tuple[tuple[Tensor, ...], ...], free: Tensor, problem: ScalarProblem
) -> DifferenceEstimate:
    """Return differences of the order below along the first direction of each tuple; at order 1, along `free`."""
    step, eps, extreme = problem.step, problem.eps, problem.is_extreme
    if not tuples[0]:

        def gradient(s: float) -> Tensor:
            return torch.stack([below(point + s * e).detach() for e in free])

        estimate = extrapolate(gradient, step, eps, extreme=extreme)
        return replace(estimate, value=estimate.value[None])

    def products(s: float) -> Tensor:
        return torch.stack([below(point + s * first, *rest).detach() for first, *rest in tuples])

    return extrapolate(products, step, eps, extreme=extreme)
