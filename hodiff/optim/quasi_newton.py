"""Minimisers with a dense inverse Hessian of Broyden's self-scaled family, on the device of the unknowns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import scipy
import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.optim.broyden import Choice, InverseHessian, ssbfgs, ssbroyden
from hodiff.optim.ends import CONVERGED, ITERATIONS, NONFINITE, PRECISION, STOPPED, Course, End, finite
from hodiff.optim.line_search import Trial, Wolfe, line_search
from hodiff.optim.objective import Objective
from hodiff.optim.own_options import (
    COUNT,
    FRACTION,
    SWITCH,
    TOLERANCE,
    require_norm,
    require_positive_matrix,
    require_wolfe,
)
from hodiff.optim.recorded_point import Point

Watch = Callable[[Point], None]


@dataclass(frozen=True)
class QuasiNewtonOptions:
    """Options of "ssbfgs" and "ssbroyden", with the names of SciPy's "bfgs" where it has them."""

    maxiter: Annotated[int | None, COUNT] = None
    gtol: Annotated[float, TOLERANCE] = 1e-5
    norm: Annotated[float, require_norm] = math.inf
    xrtol: Annotated[float, TOLERANCE] = 0.0
    c1: Annotated[float, FRACTION] = 0.1
    c2: Annotated[float, FRACTION] = 0.9
    hess_inv0: Annotated[Tensor | None, require_positive_matrix] = None
    initial_scale: Annotated[bool, SWITCH] = True


def ssbfgs_method(objective: Objective, options: QuasiNewtonOptions, watch: Watch) -> scipy.optimize.OptimizeResult:
    """Minimise by self-scaled BFGS."""
    return _minimise(objective, options, watch, ssbfgs)


def ssbroyden_method(objective: Objective, options: QuasiNewtonOptions, watch: Watch) -> scipy.optimize.OptimizeResult:
    """Minimise by the self-scaled Broyden method."""
    return _minimise(objective, options, watch, ssbroyden)


def _minimise(
    objective: Objective, options: QuasiNewtonOptions, watch: Watch, choose: Choice
) -> scipy.optimize.OptimizeResult:
    start = objective.variables.origin
    inverse = InverseHessian(choose, start, _first_matrix(options, start), scaled=options.initial_scale)
    point = objective.point(start)
    course = Course(point, point.slope)
    end = _run(objective, options, watch, course, inverse)
    return course.result(end, hess_inv=inverse.matrix)


def _first_matrix(options: QuasiNewtonOptions, start: Tensor) -> Tensor | None:
    given = options.hess_inv0
    if given is None:
        return None
    if len(given) != len(start):
        raise InputError(
            f"minimize: options['hess_inv0']: expected ({len(start)}, {len(start)}), got {tuple(given.shape)}."
        )
    return given.detach().to(start, copy=True)


def _run(
    objective: Objective, options: QuasiNewtonOptions, watch: Watch, course: Course, inverse: InverseHessian
) -> End:
    """Iterate from the point of `course`, which is updated."""
    require_wolfe(options.c1, options.c2)
    most = 200 * len(course.slope) if options.maxiter is None else options.maxiter
    if not finite(course.point, course.slope):
        return NONFINITE
    while True:
        if float(torch.linalg.vector_norm(course.slope, options.norm)) <= options.gtol:
            return CONVERGED
        if course.iterations >= most:
            return ITERATIONS
        direction = -inverse.times(course.slope)
        # Rounding may have made the matrix indefinite.
        descent = float(torch.dot(direction, course.slope))
        found = _search(objective, options, course, direction, descent, inverse.fresh) if descent < 0 else None
        if found is None:
            if inverse.fresh:
                return PRECISION
            inverse.forget()
            course.remarks[:] = [_begun_anew(course.iterations)]
            continue
        x, slope = course.point.x, found.point.slope
        inverse.learn(direction.mul_(found.step), slope - course.slope, -(found.step**2) * descent)
        course.decrease = course.point.value - found.value
        course.point, course.slope, course.iterations = found.point, slope, course.iterations + 1
        try:
            watch(course.point)
        except StopIteration:
            return STOPPED
        length = float(torch.linalg.vector_norm(direction))
        if options.xrtol and length <= options.xrtol * (options.xrtol + float(torch.linalg.vector_norm(x))):
            return End(0, "Optimization terminated successfully: the step is below xrtol.")


def _begun_anew(iteration: int) -> str:
    return (
        f"The inverse Hessian was begun anew, last at iteration {iteration}, as it gave no direction in which f falls."
    )


def _search(
    objective: Objective, options: QuasiNewtonOptions, course: Course, direction: Tensor, descent: float, fresh: bool
) -> Trial | None:
    x = course.point.x

    def evaluate(step: float) -> Trial:
        point = objective.point(torch.add(x, direction, alpha=step))
        if not point.finite:
            return Trial(step, point.value, math.nan)
        trial = Trial(step, point.value, float(torch.dot(point.slope, direction)), point)
        point.release()
        return trial

    wolfe = Wolfe(Trial(0.0, course.point.value, descent), options.c1, options.c2)
    return line_search(evaluate, wolfe, _first_step(course, descent, fresh))


def _first_step(course: Course, descent: float, fresh: bool) -> float:
    """Return 1, or less if the predicted decrease exceeds the last one (Nocedal & Wright, equation 3.60)."""
    # Without knowledge of the curvature, the step has at most length one.
    if fresh:
        return min(1.0, 1 / math.sqrt(-descent))
    return min(1.0, 2.02 * course.decrease / -descent) if course.decrease > 0 else 1.0
