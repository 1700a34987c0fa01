"""Values of the loss at points near the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.corrections import Corrections
from hodiff.optim.stochastic.local_models import Closure, value_of
from hodiff.optim.stochastic.solvers.solver_settings import SolverOptimizer
from hodiff.recompute.reachable import modules_in


class NearbyValues:
    """Values of the minimised function: the loss or its negative, plus the penalty of weight decay.

    Random numbers are equal at all points, and buffers of modules do not change.

    Args:
        optimizer: Optimizer with the settings.
        parameters: Parameters that are moved.
        loss: Loss at the parameters.
        closure: Function that computes the loss.
        draw: Random state before the closure's evaluation.

    Attributes:
        start: Value at the parameters.
        count: Number of evaluations since.
    """

    def __init__(
        self,
        optimizer: SolverOptimizer,
        parameters: Sequence[Tensor],
        loss: Tensor,
        closure: Closure,
        draw: RandomState,
    ):
        self._optimizer, self._parameters, self._closure, self._draw = optimizer, parameters, closure, draw
        self._held_modules = modules_in(closure)
        self._decay = optimizer.setting("weight_decay")
        self._sign = -1.0 if optimizer.param_groups[0].get("maximize") else 1.0
        self._places = [p.clone() for p in parameters]
        self.count = 0
        self.start = self._sign * float(loss) + self._penalty()

    def __call__(self, steps: Sequence[Tensor]) -> float:
        """Evaluate the function after a step, times the learning rates."""
        self.count += 1
        self._optimizer.add(steps, self._parameters)
        try:
            with self._draw.replayed(), untouched(self._held_modules), Corrections(lean=True):
                value = value_of(self._optimizer.caller, self._closure())
            return self._sign * float(value) + self._penalty()
        finally:
            for parameter, place in zip(self._parameters, self._places, strict=True):
                parameter.copy_(place)

    def _penalty(self) -> float:
        if not self._decay:
            return 0.0
        return 0.5 * self._decay * sum(float(p.double().square().sum()) for p in self._parameters)
