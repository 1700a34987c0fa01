"""Newton's method by conjugate gradients within a trust region, with every vector on the device of the unknowns.

Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., algorithms 4.1 and 7.2; S. Eisenstat & H. Walker,
SIAM J. Sci. Comput. 17 (1996) for the forcing terms; A. Conn, N. Gould & Ph. Toint, *Trust-Region Methods*, section
17.4 for rounding errors in the ratio of actual to predicted decrease.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import scipy
import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.optim.ends import CONVERGED, ITERATIONS, NONFINITE, STOPPED, Course, End, finite
from hodiff.optim.objective import Objective
from hodiff.optim.own_options import COUNT, FRACTION, POSITIVE, TOLERANCE, require_map
from hodiff.optim.recorded_point import Point
from hodiff.optim.steihaug import SHRINKAGE, Map, Path, Step, steihaug

STUCK = End(2, "A bad approximation caused failure to predict improvement: steps are as small as rounding.")
# Takes the norm of the gradient, the previous norm and the previous forcing term; returns the fraction of the
# residual that may remain.
Forcing = Callable[[float, float, float], float]


def _superlinear(norm: float, before: float, term: float) -> float:
    """Forcing term of SciPy's "trust-ncg"."""
    return min(0.5, math.sqrt(norm))


def _eisenstat_walker(norm: float, before: float, term: float) -> float:
    """Choice 2 of Eisenstat and Walker with its safeguard, which does not depend on units."""
    golden = (1 + math.sqrt(5)) / 2
    if not math.isfinite(before):
        return 0.5
    safeguard = term**golden
    return min(0.5, max((norm / before) ** golden, safeguard if safeguard > 0.1 else 0.0))


FORCING: dict[str, Forcing] = {"superlinear": _superlinear, "eisenstat-walker": _eisenstat_walker}


@dataclass(frozen=True)
class NewtonKrylovOptions:
    """Options of "newton-krylov", with the names of SciPy's "trust-ncg" where it has them."""

    maxiter: Annotated[int | None, COUNT] = None
    gtol: Annotated[float, TOLERANCE] = 1e-4
    initial_trust_radius: Annotated[float, POSITIVE] = 1.0
    max_trust_radius: Annotated[float, POSITIVE] = 1000.0
    eta: Annotated[float, FRACTION] = 0.15
    forcing: Annotated[str, partial(require_choice, choices=tuple(FORCING))] = "superlinear"
    preconditioner: Annotated[Any, require_map] = None
    inner_maxiter: Annotated[int | None, COUNT] = None


def newton_krylov_method(
    objective: Objective, options: NewtonKrylovOptions, watch: Callable[[Point], None]
) -> scipy.optimize.OptimizeResult:
    """Minimise an objective by Newton's method with conjugate gradients."""
    _require_consistent(options, objective.variables.space.size)
    point = objective.point(objective.variables.origin)
    course = Course(point, point.slope)
    end = _run(objective, options, watch, course)
    return course.result(end)


def _require_consistent(options: NewtonKrylovOptions, n: int) -> None:
    if options.initial_trust_radius >= options.max_trust_radius:
        raise InputError(
            "minimize: options['initial_trust_radius']: expected less than max_trust_radius = "
            f"{options.max_trust_radius:g}, got {options.initial_trust_radius:g}."
        )
    weights = options.preconditioner
    if isinstance(weights, Tensor) and (len(weights) != n or not bool((weights > 0).all())):
        raise InputError(
            f"minimize: options['preconditioner']: expected {n} positive numbers, got {len(weights)} from "
            f"{float(weights.min()):g}."
        )


def _run(objective: Objective, options: NewtonKrylovOptions, watch: Callable[[Point], None], course: Course) -> End:
    """Iterate from the point of `course`, which is updated."""
    n = len(course.slope)
    most = 200 * n if options.maxiter is None else options.maxiter
    inner = 20 * n if options.inner_maxiter is None else options.inner_maxiter
    precondition = _map_of(options.preconditioner, course.slope)
    if not finite(course.point, course.slope):
        return NONFINITE
    radius, before, term = options.initial_trust_radius, math.inf, 0.5
    path: Path | None = None
    norm = float(torch.linalg.vector_norm(course.slope))
    while True:
        if norm < options.gtol or norm == 0:
            return CONVERGED
        if course.iterations >= most:
            return ITERATIONS
        if path is None:
            term = FORCING[options.forcing](norm, before, term)
            path = steihaug(course.point.times, course.slope, term * norm, radius, max(inner, 1), precondition)
            # The path is the same in smaller balls, so the graphs can be freed.
            course.point.release()
            step = path.step
        else:
            step = path.within(radius)
        trial = objective.point(course.point.x + step.z)
        quotient = _quotient(course.point, trial, step, norm)
        if quotient < 0.25:
            radius *= SHRINKAGE
        elif quotient > 0.75 and step.bounded:
            radius = min(2 * radius, options.max_trust_radius)
        course.iterations += 1
        # NaN fails this comparison and counts as no progress.
        if quotient > options.eta:
            course.point, course.slope, path = trial, trial.slope, None
            before, norm = norm, float(torch.linalg.vector_norm(course.slope))
        else:
            while radius >= step.norm > 0:
                radius *= SHRINKAGE
        try:
            watch(course.point)
        except StopIteration:
            return STOPPED
        if not math.isfinite(norm):
            return NONFINITE
        if path is not None and step.norm <= trial.eps * float(torch.linalg.vector_norm(course.point.x)):
            return STUCK


def _quotient(point: Point, trial: Point, step: Step, norm: float) -> float:
    """Return the ratio of actual to predicted decrease; within rounding, -inf unless the norm of the gradient falls."""
    if not trial.finite or not step.change < 0:
        return -math.inf
    noise = 10 * trial.eps * max(abs(point.value), abs(trial.value))
    quotient = (point.value - trial.value + noise) / (noise - step.change)
    if -step.change > noise:
        return quotient
    return quotient if float(torch.linalg.vector_norm(trial.slope)) < norm else -math.inf


def _map_of(given: Any, like: Tensor) -> Map | None:
    """Convert the preconditioner to a function of vectors."""
    if given is None or not isinstance(given, Tensor):
        return None if given is None else lambda v: given(v).to(like)
    weights = given.detach().to(like)
    return lambda v: weights * v
