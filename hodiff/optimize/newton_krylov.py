r"""Newton's method by conjugate gradients within a trust region, with every vector on the device of the unknowns.

Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., algorithms 4.1 and 7.2; S. Eisenstat & H. Walker,
SIAM J. Sci. Comput. 17 (1996) for the forcing terms; A. Conn, N. Gould & Ph. Toint, *Trust-Region Methods*, section
17.4 for rounding errors in the ratio of actual to predicted decrease.

Steihaug's conjugate gradients: a step that lowers a quadratic model in a ball, also in smaller balls.

$$ \min_z\; g^T z + \tfrac12 z^T H z \quad\text{with}\quad \|z\|_M \le r $$

Source: T. Steihaug, SIAM J. Numer. Anal. 20 (1983); A. Conn, N. Gould & Ph. Toint, *Trust-Region Methods*, section
7.5.1, whose recurrences give norms and values of the model without additional products.
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
from hodiff.optimize.method_options import COUNT, FRACTION, POSITIVE, TOLERANCE, require_map
from hodiff.optimize.objective import Objective
from hodiff.optimize.recorded_point import Point
from hodiff.optimize.terminations import CONVERGED, ITERATIONS, NONFINITE, STOPPED, Course, End, finite

Map = Callable[[Tensor], Tensor]
# Factor by which the ball shrinks after a rejected step; the path is kept for such balls.
SHRINKAGE = 0.25


@dataclass(frozen=True)
class Segment:
    r"""Piece of the path, $z + t d$, where the model is a parabola.

    Attributes:
        value: Model at z.
        slope: Derivative with respect to t at z, negative.
        curvature: Second derivative with respect to t.
        square: $\\|z\\|_M^2$.
        cross: $z^T M d$.
        length: $\\|d\\|_M^2$.
    """

    z: Tensor
    d: Tensor
    value: float
    slope: float
    curvature: float
    square: float
    cross: float
    length: float

    def model(self, t: float) -> float:
        """Value of the model at t."""
        return self.value + t * (self.slope + t * self.curvature / 2)

    def to(self, radius: float) -> Step:
        """Return the step that ends at the ball's boundary."""
        spare = self.square - radius**2
        # Like SciPy, use the root formula without cancellation.
        half = self.cross + math.copysign(math.sqrt(max(self.cross**2 - self.length * spare, 0.0)), self.cross)
        ends = (0.0,) if half == 0 else tuple(sorted((-half / self.length, -spare / half)))
        # Along negative curvature the model may be lower at the other end.
        t = min(ends, key=self.model) if self.curvature <= 0 else ends[-1]
        return Step(torch.add(self.z, self.d, alpha=t), self.model(t), radius, True)


@dataclass(frozen=True)
class Step:
    """Step, with the model's change, the step's norm, and whether it ends at the boundary."""

    z: Tensor
    change: float
    norm: float
    bounded: bool


@dataclass(frozen=True)
class Path:
    """Step in a ball, and the pieces of the path on which it ends in balls that are smaller by `SHRINKAGE`."""

    step: Step
    pieces: tuple[Segment, ...]

    def within(self, radius: float) -> Step:
        """Return the step in a smaller ball, without a product."""
        return next(piece for piece in reversed(self.pieces) if piece.square <= radius**2).to(radius)


def steihaug(product: Map, g: Tensor, tolerance: float, radius: float, most: int, precondition: Map | None) -> Path:
    """Follow conjugate gradients until the residual's norm is below the tolerance, or to the ball's boundary."""
    z, r = torch.zeros_like(g), g
    y = r if precondition is None else precondition(r)
    d, ry = -y, float(torch.dot(r, y))
    square = cross = value = 0.0
    length = ry
    pieces: list[Segment] = []
    for _ in range(most):
        hd = product(d)
        curvature = float(torch.dot(d, hd))
        piece = Segment(z, d, value, -ry, curvature, square, cross, length)
        if not curvature > 0:
            return Path(piece.to(radius), (*pieces, piece))
        t = ry / curvature
        ahead = square + t * (2 * cross + t * length)
        if ahead >= radius**2:
            return Path(piece.to(radius), (*pieces, piece))
        if not pieces or _shrunken(radius, ahead) < _shrunken(radius, square):
            pieces.append(piece)
        z = torch.add(z, d, alpha=t)
        r = torch.add(r, hd, alpha=t)
        value, cross, square = piece.model(t), cross + t * length, ahead
        y = r if precondition is None else precondition(r)
        ry_ahead = float(torch.dot(r, y))
        size = math.sqrt(max(ry_ahead, 0.0)) if precondition is None else float(torch.linalg.vector_norm(r))
        if size < tolerance or not ry_ahead > 0:
            break
        beta = ry_ahead / ry
        d = torch.sub(beta * d, y)
        cross, length, ry = beta * cross, ry_ahead + beta**2 * length, ry_ahead
    return Path(Step(z, value, math.sqrt(square), False), tuple(pieces))


def _shrunken(radius: float, square: float) -> int:
    """Return how often the ball can shrink and still hold a point of this squared norm."""
    return math.floor(math.log(math.sqrt(square) / radius, SHRINKAGE)) if square > 0 else 10**6


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


def _run(
    objective: Objective, options: NewtonKrylovOptions, watch: Callable[[Point], None], course: Course[Point]
) -> End:
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
