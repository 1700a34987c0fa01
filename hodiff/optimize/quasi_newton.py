r"""Minimisers with a dense inverse Hessian of Broyden's self-scaled family, on the device of the unknowns.

Self-scaled updates of Broyden's family for an inverse Hessian that is stored as a matrix.

$$ H_+ = \frac1\tau\Big(H - \frac{H y y^T H}{y^T H y} + \phi\, w w^T\Big) + \frac{s s^T}{y^T s}, \qquad
   w = \sqrt{y^T H y}\,\Big(\frac{s}{y^T s} - \frac{H y}{y^T H y}\Big) $$

Source: M. Al-Baali, E. Spedicato & F. Maggioni, Optim. Methods Softw. 29 (2014), sections 4 and 5; J. Urbán,
P. Stefanou & J. Pons, J. Comput. Phys. 523 (2025), equations 13 to 23; S. Oren & D. Luenberger, Management Sci. 20
(1974).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import scipy
import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.optimize.line_search import Recorder, Trial, Wolfe, search_along
from hodiff.optimize.method_options import (
    COUNT,
    FRACTION,
    SWITCH,
    TOLERANCE,
    require_norm,
    require_positive_matrix,
    require_wolfe,
)
from hodiff.optimize.objective import Objective
from hodiff.optimize.recorded_point import Evaluation
from hodiff.optimize.terminations import CONVERGED, ITERATIONS, NONFINITE, PRECISION, STOPPED, Course, End, finite


@dataclass(frozen=True)
class Quotients:
    """Scalars that choose a member of the family.

    Attributes:
        b: $s^T B s / y^T s$, with B the inverse of H.
        h: $y^T H y / y^T s$.
        n: Number of unknowns.
    """

    b: float
    h: float
    n: int


# Returns the scale tau and Broyden's phi.
Choice = Callable[[Quotients], tuple[float, float]]


def ssbfgs(of: Quotients) -> tuple[float, float]:
    """BFGS, scaled if the Hessian was too small along the step: tau is 1 or the quotient of Oren and Luenberger."""
    return min(1.0, 1 / of.b), 1.0


def ssbroyden(of: Quotients) -> tuple[float, float]:
    """Choose the member nearest to SR1 among those that bound the condition number."""
    # a vanishes if s and Hy are parallel, and then w is zero as well.
    a = max(of.b * of.h - 1, torch.finfo(torch.float64).eps)
    # 1 - sqrt(a / (1 + a)) without cancellation.
    least = min(1.0, of.h / (1 + a + math.sqrt(a * (1 + a))))
    theta = max((least - 1) / a, min(1 / least, (1 - of.b) / of.b))
    sigma = 1 + a * theta
    root = sigma ** (1 / (1 - of.n)) if of.n > 1 else 1.0
    scale = min(1.0, 1 / of.b)
    tau = min(scale * root, sigma) if theta <= 0 else scale * min(root, 1 / theta)
    return tau, (1 - theta) / sigma


class InverseHessian:
    """Positive definite matrix (n, n) that is updated in place by steps.

    Args:
        matrix: Initial matrix, which is changed; None for the identity.
        like: A vector of the space.
        scaled: Whether an initial identity is scaled to the curvature of the first step.
    """

    def __init__(self, choose: Choice, like: Tensor, matrix: Tensor | None = None, *, scaled: bool = True):
        self._choose, self._like, self._scaled = choose, like, scaled
        # None represents the identity before the first update.
        self._matrix = matrix

    @property
    def fresh(self) -> bool:
        """Whether the matrix has had no update yet."""
        return self._matrix is None

    @property
    def matrix(self) -> Tensor:
        """The inverse Hessian as a tensor."""
        if self._matrix is None:
            self._matrix = torch.eye(len(self._like), dtype=self._like.dtype, device=self._like.device)
        return self._matrix

    def forget(self) -> None:
        """Reset the matrix to the identity."""
        self._matrix, self._scaled = None, True

    def times(self, vector: Tensor) -> Tensor:
        """Multiply the matrix with a vector."""
        return vector if self._matrix is None else self._matrix @ vector

    def learn(self, s: Tensor, y: Tensor, bs: float) -> bool:
        """Update the matrix by s, y and $s^T B s$; return False if the curvature is not positive and finite."""
        # A single transfer reads all three scalars.
        ys, yy, ss = torch.stack([torch.dot(y, s), torch.dot(y, y), torch.dot(s, s)]).tolist()
        if not ys > torch.finfo(torch.float64).eps * math.sqrt(yy * ss) or not math.isfinite(yy):
            return False
        fresh, matrix = self._matrix is None, self.matrix
        if fresh and self._scaled:
            # Nocedal & Wright, equation 6.20. The scaled identity then defines s^T B s, too.
            matrix.mul_(ys / yy)
            bs = ss * yy / ys
        hy = matrix @ y
        yhy = float(torch.dot(y, hy))
        quotients = Quotients(bs / ys, yhy / ys, len(s))
        if not (quotients.b > 0 and 0 < yhy < math.inf):
            return False
        tau, phi = self._choose(quotients)
        # s and Hy are not views of the matrix, so one in-place update of rank two needs no temporaries.
        mixed = -phi / (tau * ys)
        core = matrix.new_tensor([[1 / ys + phi * yhy / (tau * ys**2), mixed], [mixed, (phi - 1) / (tau * yhy)]])
        pair = torch.stack([s, hy], 1)
        matrix.addmm_(pair @ core, pair.T, beta=1 / tau)
        return True


Watch = Callable[[Evaluation], None]


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
    end = iterate(objective, options, watch, course, inverse)
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


def iterate(
    objective: Recorder,
    options: QuasiNewtonOptions,
    watch: Watch,
    course: Course[Any],
    inverse: InverseHessian,
    rate: float = 1.0,
) -> End:
    """Iterate from the point of `course`, which is updated with the inverse Hessian; `rate` scales first trials."""
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
        found = _search(objective, options, course, direction, descent, inverse.fresh, rate) if descent < 0 else None
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
    return f"The inverse Hessian was reset, last at iteration {iteration}, as it gave no direction in which f falls."


def _search(
    objective: Recorder,
    options: QuasiNewtonOptions,
    course: Course[Any],
    direction: Tensor,
    descent: float,
    fresh: bool,
    rate: float,
) -> Trial | None:
    wolfe = Wolfe(Trial(0.0, course.point.value, descent), options.c1, options.c2)
    return search_along(objective, course.point.x, direction, wolfe, rate * _first_step(course, descent, fresh))


def _first_step(course: Course[Any], descent: float, fresh: bool) -> float:
    """Return 1, or less if the predicted decrease exceeds the last one (Nocedal & Wright, equation 3.60)."""
    # Without knowledge of the curvature, the step has at most length one.
    if fresh:
        return min(1.0, 1 / math.sqrt(-descent))
    return min(1.0, 2.02 * course.decrease / -descent) if course.decrease > 0 else 1.0
