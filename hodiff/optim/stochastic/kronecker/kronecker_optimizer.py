"""Base class of Shampoo and SOAP: parameters as tensors of few large dimensions, and states in at least 32 bits."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from hodiff.optim.stochastic.closure_checks import Closure
from hodiff.optim.stochastic.kronecker.dimensions import second_moment, working_shape
from hodiff.optim.stochastic.magnitudes import require_norms
from hodiff.optim.stochastic.precise_states import precise, restore
from hodiff.optim.stochastic.training_optimizer import Group, StochasticOptimizer

State = dict[str, Any]


class KroneckerOptimizer(StochasticOptimizer):
    """Optimizer whose preconditioner is a Kronecker product with a factor for each dimension."""

    @abstractmethod
    def _direction(self, state: State, group: Group, gradient: Tensor) -> Tensor | None:
        """Return the direction that is subtracted from the parameter, or None for no step."""

    @abstractmethod
    def _least(self, group: Group) -> float:
        """Return the gradient norm below which no step is taken, so that squares may vanish."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step, by the gradients in `grad` or by a closure.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph. It may zero
                gradients and call backward, as for torch's optimizers, but need not.

        Returns:
            The loss, or None without a closure.

        Raises:
            InputError: If the closure returns no loss, gradients are sparse or not finite, or their squares are out of
                the range of the state's dtype.
        """
        self.require_dtypes()
        loss = None if closure is None else self.evaluated(closure, accumulates=True)
        found = [(p, group, g) for group in self.param_groups for p, g in self.gradients(group) if p.numel()]
        require_norms(self.caller, [(precise(g), self._least(group)) for _, group, g in found])
        for parameter, group, gradient in found:
            self._move(parameter, group, gradient)
        return loss

    def dtype_of_state(self, parameter: Tensor) -> torch.dtype:
        """See `StochasticOptimizer`."""
        return precise(parameter).dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as `torch.optim.Optimizer.load_state_dict` does, but keep its precision.

        Args:
            state_dict: Dict that `state_dict` returned.
        """
        super().load_state_dict(state_dict)
        restore(self, state_dict)

    def _move(self, parameter: Tensor, group: Group, gradient: Tensor) -> None:
        shape = working_shape(parameter.shape, group["max_preconditioner_size"], group["merge_dims"])
        direction = self._direction(self.state[parameter], group, precise(gradient).reshape(shape))
        if direction is None:
            return
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_((direction.reshape(parameter.shape) * group["lr"]).to(parameter.dtype))

    @staticmethod
    def _average(moments: list[Tensor | None], gradient: Tensor, keep: float, weight: float) -> None:
        """Update the second moments along the dimensions by a gradient."""
        for dim, moment in enumerate(moments):
            if moment is not None:
                moment.mul_(keep).add_(second_moment(gradient, dim, moment.dim() == 1), alpha=weight)
