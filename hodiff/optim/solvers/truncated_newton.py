"""Steps by truncated conjugate gradients, with a system of equations for each of several local models.

Iterates of conjugate gradients, for optimizers with their own stopping rules.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.common.randomness import RandomState
from hodiff.distributed.layouts import local_part
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.inner_products import InnerProduct
from hodiff.optim.local_models import Closure, LocalModel, put_gradients, require_closure
from hodiff.optim.recorded_losses import explained
from hodiff.optim.settings import BACKTRACKING
from hodiff.optim.solvers.solver_settings import NearbyValues, SolverOptimizer
from hodiff.optim.training_optimizer import Group


@dataclass(frozen=True)
class Iterate:
    r"""Iterate in the minimisation of $\phi(x) = \tfrac12 x^\top A x - b^\top x$.

    Attributes:
        count: Number of steps.
        x: Current point.
        residual: Norm of $b - A x$.
        value: $\phi(x)$.
        descent: Direction of curvature zero or less, in which $\phi$ falls without bound; only in the last iterate.
    """

    count: int
    x: Tensor
    residual: float
    value: float
    descent: Tensor | None = None


def iterates(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    inner: InnerProduct,
    start: Tensor | None = None,
    preconditioner: Tensor | None = None,
) -> Iterator[Iterate]:
    """Solve `A x = b` for a symmetric A; yield iterates until the residual is zero or curvature is not positive."""
    residual = b.clone() if start is None else b - product(start)
    # Squares of large and small numbers are out of the range of the dtype; a power of two rounds nothing.
    largest = inner.largest(b, residual)
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest and math.isfinite(largest) else 1.0
    b, residual = b / scale, residual / scale
    x = torch.zeros_like(b) if start is None else start / scale
    scaled = residual if preconditioner is None else residual / preconditioner
    direction, squared, count = scaled.clone(), inner.dot(residual, scaled), 0
    while True:
        norm = squared**0.5 if preconditioner is None else inner.norm(residual)
        value = -0.5 * inner.dot(x, b + residual) * scale * scale
        yield Iterate(count, x * scale, norm * scale, value)
        if not squared:
            return
        multiplied = product(direction)
        curvature = inner.dot(direction, multiplied)
        length = norm if preconditioner is None else inner.norm(direction)
        # Rounding makes a curvature of zero a tiny one of either sign.
        if curvature <= torch.finfo(b.dtype).eps * inner.norm(multiplied) * length:
            yield Iterate(count, x * scale, norm * scale, value, descent=direction * scale)
            return
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * multiplied
        scaled = residual if preconditioner is None else residual / preconditioner
        before, squared = squared, inner.dot(residual, scaled)
        direction = scaled + (squared / before) * direction
        count += 1


# Required fraction of the decrease that the slope predicts, and the maximum number of halvings.
_LEAST_DESCENT, _HALVINGS = 1e-4, 30


class TruncatedNewtonOptimizer(SolverOptimizer):
    """Optimizer whose step consists of approximate solutions of linear systems."""

    def __init__(self, params: Any, defaults: Group, process_group: Any):
        require_choice(self.caller, "line_search_fn", defaults["line_search_fn"], (BACKTRACKING,), optional=True)
        super().__init__(params, defaults, process_group)

    @abstractmethod
    def _models(self, returned: Any) -> Sequence[LocalModel]:
        """Build local models of the loss, each in a part of the parameters, from the closure's return value."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step, which evaluates the closure once, within `hodiff.corrected()`, and sets gradients.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph and without
                calling backward. With Gauss-Newton matrices it returns the pair (outputs, loss): outputs of the model
                and a function of them that returns one number. A line search evaluates it again at each point, with
                equal random numbers.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no closure, or its return value is invalid; or if ranks drift apart.
            RouteError: If torch does not implement a second derivative.
        """
        require_closure(self.caller, closure)
        assert closure is not None
        draw = RandomState(self.parameters())
        models = self.joined(*self.attempted(closure, lambda: self._models(self.returned(closure))))
        parameters = [p for model in models for p in model.parameters]
        for model in models:
            self.agree(model.require_finite)
        put_gradients(parameters, [g for model in models for g in model.leaves(model.gradient)])
        solutions = [self._solution(model) for model in models]
        found = [each for each, _ in solutions]
        self.agree(lambda: require_finite(self.caller, "solutions of Newton's equations", found))
        steps = [leaf for model, (found, _) in zip(models, solutions, strict=True) for leaf in model.leaves(found)]
        if self.setting("line_search_fn") is None:
            self.add(steps, parameters)
        else:
            values = NearbyValues(self, parameters, models[0], closure, draw)
            gain = self._search(steps, values, parameters)
            self._trust(gain, sum(promised for _, promised in solutions))
        return models[0].loss

    def _trust(self, gain: float, promised: float) -> None:
        """Adapt to the change of the value at the full step and the change that the models predicted."""

    def _solution(self, model: LocalModel) -> tuple[Tensor, float]:
        """Solve for a step; also return the change of the damped model along it."""
        sign = self._sign
        decay, damping = self.setting("weight_decay"), self.setting("damping")
        place = model.vector([p.detach() for p in model.parameters])
        right = -(sign * model.gradient + decay * place)
        enough = self.setting("cg_tolerance") * model.inner.norm(right)

        def product(v: Tensor) -> Tensor:
            return sign * model.product(v) + (decay + damping) * v

        with explained(self.caller):
            for each in iterates(product, right, model.inner):
                if each.descent is not None and not each.count:
                    return each.descent, each.value
                if each.residual <= enough or each.count >= self.setting("cg_iterations"):
                    break
        return each.x, each.value

    def _search(self, steps: Sequence[Tensor], values: NearbyValues, parameters: Sequence[Tensor]) -> float:
        """Halve the step until it descends enough, or take none; return the change of the value at the full step."""
        whole = math.nan
        rates, decay = self.rates(), self.setting("weight_decay")
        slopes = []
        for parameter, step in zip(parameters, steps, strict=True):
            assert parameter.grad is not None
            descended = self._sign * local_part(parameter.grad) + decay * local_part(parameter)
            slopes.append(float(torch.sum(descended * local_part(step))) * float(rates[id(parameter)]))
        slope = self.total(parameters, slopes)
        # Near a minimum the decrease is smaller than rounding.
        tolerance = torch.finfo(parameters[0].dtype).eps * abs(values.start)
        for halvings in range(_HALVINGS):
            factor = 0.5**halvings
            shorter = [factor * step for step in steps]
            value = values(shorter)
            whole = value - values.start if not halvings else whole
            if math.isfinite(value) and value <= values.start + _LEAST_DESCENT * factor * slope + tolerance:
                self.add(shorter, parameters)
                break
        return whole

    @property
    def _sign(self) -> float:
        return -1.0 if self.setting("maximize") else 1.0
