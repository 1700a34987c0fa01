"""Newton's method with factors of the Hessian, shifted by a multiple of the identity to be positive definite.

Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., algorithms 3.2 and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import scipy
import torch
from torch import Tensor

from hodiff.optimize.hessian_factors import Shifted
from hodiff.optimize.line_search import Trial, Wolfe, search_along
from hodiff.optimize.method_options import COUNT, FRACTION, TOLERANCE, require_norm, require_wolfe
from hodiff.optimize.objective import Objective
from hodiff.optimize.recorded_point import Point
from hodiff.optimize.terminations import CONVERGED, ITERATIONS, NONFINITE, PRECISION, STOPPED, Course, End, finite

# Smallest shift relative to the largest diagonal entry, and the factor by which a shift grows that is too small.
LEAST, RAISE = 1e-4, 8.0
# After this many increases the shift exceeds every eigenvalue of a finite matrix.
MOST = 60


@dataclass(frozen=True)
class NewtonOptions:
    """Options of "newton", with the names of SciPy's "bfgs" where it has them."""

    maxiter: Annotated[int | None, COUNT] = None
    gtol: Annotated[float, TOLERANCE] = 1e-5
    norm: Annotated[float, require_norm] = math.inf
    c1: Annotated[float, FRACTION] = 1e-4
    c2: Annotated[float, FRACTION] = 0.9


def newton_method(
    objective: Objective, options: NewtonOptions, watch: Callable[[Point], None]
) -> scipy.optimize.OptimizeResult:
    """Minimise an objective by Newton's method."""
    require_wolfe(options.c1, options.c2)
    point = objective.point(objective.variables.origin)
    course = Course(point, point.slope)
    point.release()
    end = _run(objective, options, watch, course)
    return course.result(end)


def _run(objective: Objective, options: NewtonOptions, watch: Callable[[Point], None], course: Course[Point]) -> End:
    """Iterate from the point of `course`, which is updated."""
    most = 200 * len(course.slope) if options.maxiter is None else options.maxiter
    if not finite(course.point, course.slope):
        return NONFINITE
    shift = 0.0
    while True:
        if float(torch.linalg.vector_norm(course.slope, options.norm)) <= options.gtol:
            return CONVERGED
        if course.iterations >= most:
            return ITERATIONS
        found = newton_direction(objective.factorable(course.point.x), course.slope, shift)
        if found is None:
            return NONFINITE
        direction, shift = found
        start = Trial(0.0, course.point.value, float(torch.dot(direction, course.slope)))
        trial = search_along(objective, course.point.x, direction, Wolfe(start, options.c1, options.c2))
        if trial is None:
            return PRECISION
        course.point, course.slope, course.iterations = trial.point, trial.point.slope, course.iterations + 1
        try:
            watch(course.point)
        except StopIteration:
            return STOPPED


def newton_direction(matrix: Shifted, slope: Tensor, last: float) -> tuple[Tensor, float] | None:
    """Return a descent direction and its shift, given the `last` shift; None if no shift is large enough."""
    largest = float(matrix.diagonal.abs().max())
    least = LEAST * largest if largest else LEAST
    # A negative entry on the diagonal is an upper bound of the lowest eigenvalue.
    lowest = float(matrix.diagonal.min())
    shift = 0.0 if lowest > 0 else least - lowest
    for _ in range(MOST):
        direction = matrix.solve(shift, -slope)
        # Rounding may spoil the solution of a system that is nearly singular.
        if direction is not None and float(torch.dot(direction, slope)) < 0 and bool(direction.isfinite().all()):
            return direction, shift
        shift = max(least, last / RAISE, RAISE * shift)
        last = 0.0
    return None
