"""Derivatives by every route, climbed order by order: each order is judged by differences of the last."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hodiff.checks.comparison import Failure, Outcome, attempt, exact, is_settled, judge, scale_of
from hodiff.checks.compositions import derivative, route_names
from hodiff.checks.finite_differences import DifferenceEstimate, extrapolate
from hodiff.checks.report import Entry
from hodiff.checks.scalarize import Problem, draw
from hodiff.checks.scipy_oracle import scipy_hessian

Loss = Callable[[Tensor], Tensor]
# (t, v_1, ..., v_{k-1}) -> D^k loss(t)[v_1, ..., v_{k-1}, .], or the loss itself at k = 0
Trusted = Callable[..., Tensor]

ORACLE_DIMENSION = 4


@dataclass(frozen=True)
class Level:
    """One order of derivative at a point, by all routes.

    Attributes:
        order: The order k.
        tuples: The tuples of k - 1 directions at which it was taken.
        outcomes: By route, the derivatives of shape (len(tuples), m), or the failure.
        differences: The same from differences of the order below.
        truth: The first route that agrees with the differences, else the differences.
        trusted: The function that gives the truth at any point.
        lower: The largest of the lower orders, at whose rounding level a derivative that vanishes is compared.
        eps: The rounding of the problem.
    """

    order: int
    tuples: tuple[tuple[Tensor, ...], ...]
    outcomes: dict[str, Outcome]
    differences: DifferenceEstimate
    truth: DifferenceEstimate
    trusted: Trusted
    lower: float
    eps: float

    @property
    def settled(self) -> bool:
        """Whether there is a truth to judge by."""
        return is_settled(self.truth, self.lower, self.eps)

    @property
    def scale(self) -> float:
        """The size against which errors count."""
        return scale_of(self.truth.value, self.lower, self.eps)


def climb(problem: Problem, loss: Loss, order: int, generator: torch.Generator) -> list[Level]:
    """Differentiate a loss at the origin to an order, and stop early where no truth is left to climb on."""
    levels: list[Level] = []
    trusted: Trusted = loss
    lower = float(loss(problem.point).detach().abs())
    for k in range(1, order + 1):
        level = _level(problem, loss, trusted, k, _tuples(problem, k, generator), lower)
        levels.append(level)
        if not level.settled:
            break
        trusted, lower = level.trusted, max(lower, level.scale)
    return levels


def evaluate(loss: Loss, route: str, point: Tensor, tuples: tuple[tuple[Tensor, ...], ...]) -> Tensor:
    """Take one route's derivative at all tuples of directions, stacked."""
    function = derivative(loss, route)
    return torch.stack([function(point, *directions) for directions in tuples]).detach()


def against_differences(levels: list[Level], order: int, quantity: str = "vs differences") -> Iterator[Entry]:
    """Compare each route with differences of the order below."""
    for level in levels:
        for route, outcome in level.outcomes.items():
            yield judge(route, level.order, quantity, outcome, level.differences, lower=level.lower, eps=level.eps)
    for k in range(len(levels) + 1, order + 1):
        yield Entry("all routes", k, quantity, None, None, "skipped", "the order below has no settled value")


def between_routes(levels: list[Level]) -> Iterator[Entry]:
    """Compare each route with the trusted one, to rounding: finer than any difference can see."""
    for level in levels:
        for route, outcome in level.outcomes.items():
            if level.truth is level.differences:
                yield Entry(route, level.order, "vs routes", None, None, "skipped", "no route is trusted")
            else:
                yield judge(route, level.order, "vs routes", outcome, level.truth, lower=level.lower, eps=level.eps)


def against_scipy(problem: Problem, loss: Loss, levels: list[Level], generator: torch.Generator) -> Iterator[Entry]:
    """Compare each route's Hessian with SciPy's, on a few directions, which bounds the evaluations."""
    for level in levels[1:2]:
        W = _projection(problem, generator)
        estimate = attempt(_scipy_estimate, problem, loss, W, level.scale)
        doubt = _doubt(level, estimate)
        for route, outcome in level.outcomes.items():
            if doubt:
                yield Entry(route, 2, "vs SciPy", None, None, "skipped", doubt)
                continue
            product = outcome if isinstance(outcome, Failure) else W.T @ outcome @ W
            yield judge(route, 2, "vs SciPy", product, estimate, lower=level.lower, eps=level.eps)


def in_own_dtype(problem: Problem, loss: Loss, levels: list[Level], quantity: str) -> Iterator[Entry]:
    """Compare each route in the inputs' own dtypes with the float64 truth, where it is right in float64."""
    for level in levels:
        for route, double in level.outcomes.items():
            compare = partial(judge, route, level.order, quantity, lower=level.lower)
            if compare(double, level.truth, eps=level.eps).failed:
                yield Entry(route, level.order, quantity, None, None, "skipped", "no float64 value")
                continue
            outcome = attempt(evaluate, loss, route, problem.point, level.tuples)
            yield compare(outcome, level.truth, eps=problem.eps, wrong="imprecise")


def _level(
    problem: Problem, loss: Loss, below: Trusted, k: int, tuples: tuple[tuple[Tensor, ...], ...], lower: float
) -> Level:
    point, eps = problem.point, problem.eps
    outcomes = {route: attempt(evaluate, loss, route, point, tuples) for route in route_names(k)}
    differences = _differences(below, point, tuples, problem.step, eps)
    for route, outcome in outcomes.items():
        if judge(route, k, "", outcome, differences, lower=lower, eps=eps).status == "ok":
            return Level(k, tuples, outcomes, differences, exact(outcome), derivative(loss, route), lower, eps)

    def by_differences(t: Tensor, *directions: Tensor) -> Tensor:
        return _differences(below, t, (directions,), problem.step, eps).value[0]

    return Level(k, tuples, outcomes, differences, differences, by_differences, lower, eps)


def _differences(
    below: Trusted, point: Tensor, tuples: tuple[tuple[Tensor, ...], ...], step: float, eps: float
) -> DifferenceEstimate:
    """Difference the order below along the first direction of each tuple; at order 1, along the basis."""
    if not tuples[0]:
        basis = torch.eye(len(point), dtype=point.dtype, device=point.device)
        estimate = extrapolate(lambda s: torch.stack([below(point + s * e).detach() for e in basis]), step, eps)
        return replace(estimate, value=estimate.value[None])
    return extrapolate(
        lambda s: torch.stack([below(point + s * first, *rest).detach() for first, *rest in tuples]),
        step,
        eps,
    )


def _tuples(problem: Problem, k: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], ...]:
    """No direction makes the gradient, the basis the full Hessian; beyond, two random tuples do."""
    m, device = len(problem.point), problem.point.device
    if k == 1:
        return ((),)
    if k == 2:
        return tuple((e,) for e in torch.eye(m, dtype=torch.float64, device=device))
    return tuple(tuple(v.to(device) for v in draw((k - 1, m), generator)) for _ in range(2))


def _projection(problem: Problem, generator: torch.Generator) -> Tensor:
    m = len(problem.point)
    if m <= ORACLE_DIMENSION:
        return torch.eye(m, dtype=torch.float64, device=problem.point.device)
    return draw((m, ORACLE_DIMENSION - 1), generator).to(problem.point.device)


def _scipy_estimate(problem: Problem, loss: Loss, W: Tensor, scale: float) -> DifferenceEstimate:
    """Take SciPy's Hessian of s -> loss(W s), from smaller steps if the first ones leave the domain."""
    origin = torch.zeros(W.shape[1], dtype=torch.float64, device=W.device)
    found = []

    def value(s: Tensor) -> Tensor | float:
        outcome = attempt(loss, W @ s)
        return math.nan if isinstance(outcome, Failure) else outcome

    for step in (5 * problem.step, 0.5 * problem.step, 0.05 * problem.step):
        estimate = scipy_hessian(
            value,
            origin,
            initial_step=step,
            order=4,
            maxiter=8,
            tolerances={"atol": 1e-10 * scale},
        )
        error = float(estimate.error.max()) if bool(estimate.matrix.isfinite().all()) else math.inf
        found.append(DifferenceEstimate(estimate.matrix.to(W), error, step, smooth=True))
        if error <= 1e-6 * scale:
            break
    return min(found, key=lambda estimate: estimate.error)


def _doubt(level: Level, estimate: DifferenceEstimate | Failure) -> str:
    """Why SciPy's estimate cannot judge; empty if it can. At a kink it may settle on a wrong value."""
    if isinstance(estimate, Failure):
        return estimate.message
    if not level.settled:
        return "the point is not smooth"
    return "" if is_settled(estimate, level.lower, level.eps) else "SciPy's differences do not settle"
