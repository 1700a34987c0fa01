"""Base class of optimizers that solve equations over all groups at once, so that groups share settings but lr.

Values of the loss at points near the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.corrections import Corrections
from hodiff.distributed.layouts import local_part
from hodiff.errors import InputError
from hodiff.graphs import inspect_graph
from hodiff.optim.local_models import (
    Closure,
    GaussNewtonModel,
    HessianModel,
    LocalModel,
    outputs_and_loss,
    value_of,
)
from hodiff.optim.ranks import Ranks, code_of, differ, mark_of
from hodiff.optim.recorded_losses import explained
from hodiff.optim.sharded_closures import ShardedClosure
from hodiff.optim.training_optimizer import Group, StochasticOptimizer
from hodiff.recompute.lost_slopes import noting_operands
from hodiff.recompute.reachable import modules_in

R = TypeVar("R")

# Ratios of actual to predicted decrease, and the factors of the damping below the first or above the second.
_TRUST = ((0.25, 3 / 2), (0.75, 2 / 3))


class SolverOptimizer(StochasticOptimizer):
    """Optimizer with one curvature matrix for all parameters."""

    sharded_by_group: ClassVar[bool | None] = True
    # The closure of the running step, if parameters are sharded.
    _closure_on_shards: ShardedClosure | None = None
    # Settings that may differ between groups.
    _own: ClassVar[frozenset[str]] = frozenset({"params", "param_names", "lr", "initial_lr"})

    def __init__(self, params: Any, defaults: Group, process_group: Any):
        self._ranks = Ranks(self.caller, process_group)
        super().__init__(params, defaults)

    def setting(self, name: str) -> Any:
        """Return a setting of all groups; schedulers may change it in the first group."""
        return self.param_groups[0][name]

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with a separate learning rate.

        Args:
            param_group: A dict of "params" and "lr".

        Raises:
            InputError: If the group's other settings differ from those of the first group.
        """
        first = self.param_groups[0] if self.param_groups else {}
        for name, value in param_group.items():
            if name not in self._own and name in first and first[name] != value:
                raise InputError(
                    f"{self.caller}: {name}: expected {first[name]!r}, as in the first group, got {value!r}. All "
                    "groups share one system of equations; create two optimizers, or use groups that differ only in "
                    "lr."
                )
        super().add_param_group(param_group)

    def returned(self, closure: Closure) -> Any:
        """Evaluate a closure and return its result, with its graph."""
        self.clear_gradients()
        with torch.enable_grad(), Corrections(lean=True, many=True), noting_operands(self):
            returned = closure() if self._closure_on_shards is None else self._closure_on_shards.returned()
        if any(parameter.grad is not None for parameter in self.parameters()):
            raise InputError(
                f"{self.caller}: closure: expected a closure that does not call backward, which frees the graph that "
                "the curvature needs, got one that does; remove backward, step sets the gradients."
            )
        return returned

    def model(self, returned: Any, parameters: Sequence[Tensor]) -> LocalModel:
        """Build the local model of a loss in some parameters, from the return value of a closure."""
        with explained(self.caller):
            return self.kind(self.caller, parameters, returned, self._closure_on_shards)

    def attempted(self, closure: Closure, build: Callable[[], R]) -> tuple[R | None, Exception | None]:
        """Build local models from a closure's result; on shards, no rank can announce an error to the others."""
        if not self.sharded:
            return self._ranks.attempt(build)
        shards = self._closure_on_shards = ShardedClosure(self.caller, closure, self.parameters(), self._ranks)
        try:
            return shards.recorded(build), None
        finally:
            self._closure_on_shards = None

    def value(self, closure: Closure) -> Tensor:
        """Evaluate a closure's loss at the parameters."""
        if self.sharded:
            closure = ShardedClosure(self.caller, closure, self.parameters(), self._ranks).returned
        return value_of(self.caller, closure())

    def joined(self, models: Sequence[LocalModel] | None, error: Exception | None) -> Sequence[LocalModel]:
        """Make the models of this rank those of the mean loss of all ranks.

        Args:
            models: Models of this rank's loss, each in a part of the parameters.
            error: Error that prevented them, if any.

        Returns:
            The models.

        Raises:
            InputError: If any rank has an error, or the ranks' parameters differ.
        """
        models = models or []
        if self._ranks.size > 1:
            own, numbers = self.parameters(), [0.0, 0.0]
            if error is None:
                indices = {id(p): i for i, p in enumerate(own)}
                reached = code_of(indices[id(p)] for model in models for p in model.parameters)
                numbers = [0.0 if self.sharded else mark_of(own), reached]
            rows = self._ranks.exchange(self.caller, error, numbers, self.device)
            self.require_equal(rows[:, :1])
            if differ(rows[:, 1:]):
                raise InputError(
                    f"{self.caller}: closure: expected losses of all ranks that depend on the same parameters, got "
                    "different parameters; use every parameter in the loss of every rank, for instance times zero."
                )
            for model in models:
                model.join(self._ranks)
        elif self._ranks.watched:
            self._watch([model.gradient for model in models], float(models[0].loss))
        return models

    @property
    def kind(self) -> type[LocalModel]:
        """Class of the local models."""
        return GaussNewtonModel

    def reached(self, returned: Any) -> list[Tensor]:
        """Return the parameters on which a closure's result depends; other parameters do not move."""
        own = self.parameters()
        if not own:
            raise InputError(
                f"{self.caller}: params: expected at least one parameter that requires a gradient, got frozen ones "
                "only; call requires_grad_() of those to train."
            )
        ends = returned if self.kind is HessianModel else outputs_and_loss(self.caller, returned)[0]
        tensors = [each for each in pytree.tree_leaves(ends) if isinstance(each, Tensor)]
        # Without any such parameter, the model of all parameters raises a fitting error.
        if self._closure_on_shards is not None:
            return self._closure_on_shards.reached(*tensors) or own
        leaves = {id(leaf) for each in tensors for leaf in inspect_graph(each)[0]}
        return [p for p in own if id(p) in leaves] or own

    def rates(self) -> dict[int, Any]:
        """Return the learning rate of each parameter, by id."""
        return {id(p): group["lr"] for group in self.param_groups for p in group["params"]}

    def add(self, steps: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Move parameters by a step, times the learning rate of their group."""
        rates = self.rates()
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.add_(step * rates[id(parameter)])


def trust_factor(ratio: float) -> float:
    """Return the factor of the damping, by the ratio of actual to predicted decrease."""
    (low, more), (high, less) = _TRUST
    return less if ratio > high else 1.0 if ratio >= low else more


class NearbyValues:
    """Values of the minimised function: the loss or its negative, plus the penalty of weight decay.

    Random numbers are equal at all points, those after `draw`, and buffers of modules do not change.

    Attributes:
        start: Value at the parameters.
        count: Number of evaluations since.
    """

    def __init__(
        self,
        optimizer: SolverOptimizer,
        parameters: Sequence[Tensor],
        model: LocalModel,
        closure: Closure,
        draw: RandomState,
    ):
        self._optimizer, self._parameters, self._closure, self._draw = optimizer, parameters, closure, draw
        self._ranks = model.ranks
        self._held_modules = modules_in(closure)
        self._decay = optimizer.setting("weight_decay")
        self._sign = -1.0 if optimizer.param_groups[0].get("maximize") else 1.0
        self._places = [p.clone() for p in parameters]
        self.count = 0
        self.start = self._sign * float(model.loss) + self._penalty()

    def __call__(self, steps: Sequence[Tensor]) -> float:
        """Evaluate the function after a step, times the learning rates."""
        self.count += 1
        value: float | None = None
        error: Exception | None = None
        if self._optimizer.sharded:
            value = self._own_value(steps)
        else:
            value, error = self._ranks.attempt(self._own_value, steps)
        if self._ranks.size > 1:
            rows = self._ranks.exchange(self._optimizer.caller, error, [value or 0.0], self._places[0].device)
            return float(rows.mean())
        assert value is not None
        return value

    def _own_value(self, steps: Sequence[Tensor]) -> float:
        self._optimizer.add(steps, self._parameters)
        try:
            with self._draw.replayed(), untouched(self._held_modules), Corrections(lean=True):
                value = self._optimizer.value(self._closure)
            return self._sign * float(value) + self._penalty()
        finally:
            for parameter, place in zip(self._parameters, self._places, strict=True):
                parameter.copy_(place)

    def _penalty(self) -> float:
        if not self._decay:
            return 0.0
        squares = [float(local_part(p).double().square().sum()) for p in self._parameters]
        return 0.5 * self._decay * self._optimizer.total(self._parameters, squares)
