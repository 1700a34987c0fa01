r"""Levenberg-Marquardt with geodesic acceleration, on the device of the unknowns.

$$ (J^T J + \lambda D^2)\, v = -J^T r, \qquad (J^T J + \lambda D^2)\, a = -J^T D^2 r[v, v], \qquad
   x_+ = x + v + \tfrac12 a \quad\text{where}\quad \|D a\| \le \alpha\, \|D v\| $$

Source: M. Transtrum & J. Sethna, "Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares
minimization", arXiv:1201.5885, sections 3 to 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import scipy
import torch
from torch import Tensor

from hodiff.derivatives import jacobian
from hodiff.optimize.terminations import INTERRUPTED
from hodiff.optimize.variables import Variables
from hodiff.taylor import directional_derivatives

# Delayed gratification: the damping grows slowly and falls fast.
GROWTH, DECAY = 2.0, 5.0
# First damping, relative to the largest squared singular value.
FIRST = 1e-3

# SciPy's messages, by status.
MESSAGES = {
    0: "The maximum number of function evaluations is exceeded.",
    1: "`gtol` termination condition is satisfied.",
    2: "`ftol` termination condition is satisfied.",
    3: "`xtol` termination condition is satisfied.",
    4: "Both `ftol` and `xtol` termination conditions are satisfied.",
    -1: "The Jacobian is not finite at x.",
}
# Status by whether the cost hardly changes and whether the step is short.
ENDS = {(True, True): 4, (True, False): 2, (False, True): 3}


@dataclass(frozen=True)
class Rules:
    r"""Rules for accepting steps and for ending the run.

    Attributes:
        ftol: Smallest relative change of the cost; None to ignore it.
        xtol: Smallest length of a step relative to the length of x; None to ignore it.
        gtol: Smallest value of the gradient's largest element; None to ignore it.
        most: Largest number of evaluations of the residuals.
        acceleration: Largest $\alpha$; 0 for steps without acceleration.
    """

    ftol: float | None
    xtol: float | None
    gtol: float | None
    most: int
    acceleration: float


@dataclass(frozen=True)
class Linearization:
    """Residuals and Jacobian at a point, factored so that each damping costs two products.

    Attributes:
        jacobian: (m, n).
        gradient: $J^T r$.
    """

    x: Tensor
    residuals: Tensor
    jacobian: Tensor
    gradient: Tensor
    left: Tensor
    singular: Tensor
    right: Tensor
    scales: Tensor

    @classmethod
    def at(cls, x: Tensor, residuals: Tensor, matrix: Tensor, scales: Tensor) -> Linearization:
        """Factor `J D^-1` by singular values, after a QR decomposition."""
        q, r = torch.linalg.qr(matrix * scales)
        u, singular, vh = torch.linalg.svd(r, full_matrices=False)
        return cls(x, residuals, matrix, matrix.mT @ residuals, q @ u, singular, vh.mT, scales)

    def solve(self, right_hand_side: Tensor, damping: float) -> Tensor:
        """Solve the damped least-squares problem with these residuals; return the scaled step $D z$."""
        weights = self.singular / (self.singular.square() + damping)
        return -(self.right @ (weights * (self.left.mT @ right_hand_side)))


class Problem:
    """Residuals and their derivatives as float64 vectors, with counts of the evaluations."""

    def __init__(self, residuals: Callable[[Tensor], Tensor], variables: Variables):
        self._residuals, self._dtype = residuals, variables.space.dtype
        self.values = self.jacobians = self.accelerations = 0
        self.accepted: Tensor | None = None

    def value(self, x: Tensor) -> Tensor:
        """Compute the residuals; the function itself may differentiate with respect to x."""
        self.values += 1
        with torch.enable_grad():
            return self._residuals(x.detach().to(self._dtype).requires_grad_()).detach().double()

    def jacobian(self, x: Tensor) -> Tensor:
        """Compute the Jacobian (m, n) at an accepted point."""
        self.jacobians += 1
        self.accepted = x
        return jacobian(self._residuals)(x.to(self._dtype)).detach().double()

    def acceleration(self, x: Tensor, v: Tensor) -> Tensor:
        """Compute the second derivative of the residuals along v."""
        self.accelerations += 1
        point, direction = x.to(self._dtype), v.to(self._dtype)
        return directional_derivatives(self._residuals, point, direction, order=2)[2].detach().double()


def geodesic_least_squares(
    problem: Problem, start: Tensor, scales: Tensor | None, rules: Rules
) -> scipy.optimize.OptimizeResult:
    """Minimise from `start`, also until Ctrl-C; `scales` of None are computed from the columns of the Jacobian."""
    try:
        return _iterate(problem, start, scales, rules)
    except KeyboardInterrupt:
        counts = {"nit": max(problem.jacobians - 1, 0), "nfev": problem.values, "njev": problem.jacobians}
        accepted = start if problem.accepted is None else problem.accepted
        found = _iterate(problem, accepted, scales, replace(rules, most=0))
        end = {"success": False, "status": INTERRUPTED.status, "message": INTERRUPTED.message}
        found.update(naev=problem.accelerations, **counts, **end)
        return found


def _iterate(problem: Problem, start: Tensor, scales: Tensor | None, rules: Rules) -> scipy.optimize.OptimizeResult:
    by_columns = scales is None
    x, residuals = start, problem.value(start)
    cost, steps = _cost(residuals), 0
    damping: float | None = None
    while True:
        matrix = problem.jacobian(x)
        if not bool(torch.isfinite(matrix).all()):
            return _result(problem, (x, residuals, matrix), -1, steps)
        if by_columns or scales is None:
            scales = _by_columns(matrix, scales)
        here = Linearization.at(x, residuals, matrix, scales)
        if rules.gtol is not None and float(here.gradient.abs().max()) < rules.gtol:
            return _result(problem, (x, residuals, matrix), 1, steps)
        if damping is None:
            damping = max(FIRST * float(here.singular[0]) ** 2, np.finfo(float).tiny)
        taken = _step(problem, here, cost, damping, rules)
        steps += 1
        if taken.status is not None:
            if taken.x is not x:
                matrix = problem.jacobian(taken.x)
            return _result(problem, (taken.x, taken.residuals, matrix), taken.status, steps)
        x, residuals, cost, damping = taken.x, taken.residuals, taken.cost, taken.damping


def _by_columns(matrix: Tensor, before: Tensor | None) -> Tensor:
    """Compute scales as MINPACK does: they never grow, and columns of zeros have norm one."""
    norms = torch.linalg.vector_norm(matrix, dim=0)
    if before is None:
        return 1 / torch.where(norms == 0, 1.0, norms)
    return torch.minimum(before, 1 / norms)


@dataclass(frozen=True)
class Taken:
    """Outcome of a step, with SciPy's status if the run ends."""

    x: Tensor
    residuals: Tensor
    cost: float
    damping: float
    status: int | None = None


def _step(problem: Problem, here: Linearization, cost: float, damping: float, rules: Rules) -> Taken:
    """Raise the damping until the cost falls and the acceleration is small relative to the velocity."""
    length = float(torch.linalg.vector_norm(here.x))
    while True:
        if problem.values >= rules.most:
            return Taken(here.x, here.residuals, cost, damping, 0)
        velocity = here.solve(here.residuals, damping)
        scaled = velocity
        small = True
        if rules.acceleration:
            bent = problem.acceleration(here.x, velocity * here.scales)
            # At a boundary of the function's domain the second derivative may not be finite; the step is then straight.
            curve = here.solve(bent, damping) if bool(torch.isfinite(bent).all()) else torch.zeros_like(velocity)
            small = bool(torch.linalg.vector_norm(curve) <= rules.acceleration * torch.linalg.vector_norm(velocity))
            scaled = velocity + curve / 2
        step = scaled * here.scales
        size = float(torch.linalg.vector_norm(velocity * here.scales))
        short = rules.xtol is not None and size < rules.xtol * (rules.xtol + length)
        if small:
            x = here.x + step
            residuals = problem.value(x)
            ahead = _cost(residuals)
            predicted = cost - _cost(here.residuals + here.jacobian @ (velocity * here.scales))
            flat = rules.ftol is not None and max(abs(cost - ahead), predicted) < rules.ftol * cost
            if ahead < cost:
                return Taken(x, residuals, ahead, damping / DECAY, ENDS.get((flat, short)))
            if flat:
                return Taken(here.x, here.residuals, cost, damping, ENDS[flat, short])
        if short or size == 0:
            return Taken(here.x, here.residuals, cost, damping, 3)
        damping *= GROWTH


def _cost(residuals: Tensor) -> float:
    """Half the sum of squares; infinite where a residual is not finite."""
    cost = float(torch.dot(residuals, residuals)) / 2
    return cost if math.isfinite(cost) else math.inf


def _result(
    problem: Problem, at: tuple[Tensor, Tensor, Tensor], status: int, steps: int
) -> scipy.optimize.OptimizeResult:
    """Build the result of `scipy.optimize.least_squares` from point, residuals and Jacobian."""
    x, residuals, matrix = at
    gradient = matrix.mT @ residuals
    return scipy.optimize.OptimizeResult(
        x=Variables.array(x),
        cost=_cost(residuals),
        fun=Variables.array(residuals),
        jac=Variables.array(matrix),
        grad=Variables.array(gradient),
        optimality=float(gradient.abs().max()),
        active_mask=np.zeros(len(x)),
        nit=steps,
        nfev=problem.values,
        njev=problem.jacobians,
        naev=problem.accelerations,
        status=status,
        message=MESSAGES[status],
        success=status > 0,
    )
