"""The self-scaled Broyden method for training loops that pass closures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.randomness import RandomState
from hodiff.corrections import Corrections
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.local_models import Closure, require_closure
from hodiff.optim.optimizer_states import Shapes
from hodiff.optim.settings import settings_in
from hodiff.optim.solvers.solver_settings import SolverOptimizer
from hodiff.optimize.quasi_newton import InverseHessian, QuasiNewtonOptions, iterate, ssbroyden
from hodiff.optimize.terminations import Course


class SSBroyden(SolverOptimizer):
    r"""Self-scaled Broyden method: quasi-Newton steps with a dense inverse Hessian, for many digits.

    $$ \theta \leftarrow \theta - t H g, \qquad
       H \leftarrow \frac1\tau\Big(H - \frac{H y y^\top H}{y^\top H y} + \phi\, w w^\top\Big)
       + \frac{s s^\top}{y^\top s} $$

    `hodiff.optimize.minimize(method="ssbroyden")` in the interface of `torch.optim.LBFGS`, for loops that are written
    already, such as those of DeepXDE, PINA and Lightning. The iterates of one or several steps are those of one run of
    `minimize`, for the same loss in each step. The state is a matrix (n, n) in float64, for up to some thousand
    parameters. Parameters that the loss of a step does not use do not move, and keep their block of the matrix, whose
    entries between used and unused parameters become zero. The matrix starts anew when parameters are frozen or
    unfrozen.

    Args:
        params: Parameters, or groups of them; real and floating-point. Use float64 for many digits.
        lr: Factor of the first length that each line search tries; 1 for quasi-Newton steps.
        max_iter: Maximum number of iterations in a step.
        tolerance_grad: Largest entry of the gradient at which a step ends.
        process_group: Process group of `torch.distributed` whose ranks train this model, such as
            `torch.distributed.group.WORLD`. Loss and gradient are means over the ranks. "local" if each rank
            has a model of its own.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex or a DTensor over several ranks.

    Example:
        >>> import torch, hodiff
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> optimizer = hodiff.optim.SSBroyden([w])
        >>> for _ in range(3):
        ...     loss = optimizer.step(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2)
        >>> torch.allclose(w, torch.ones(2, dtype=torch.float64), atol=1e-7)
        True

    Source: M. Al-Baali, E. Spedicato & F. Maggioni, Optim. Methods Softw. 29 (2014); J. Urbán, P. Stefanou & J. Pons,
    J. Comput. Phys. 523 (2025), equations 13 to 23.
    """

    sharded_by_group = None
    whole_state = frozenset({"inverse_hessian", "decrease"})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        max_iter: int = 20,
        tolerance_grad: float = 1e-12,
        *,
        process_group: Any = None,
    ):
        super().__init__(params, settings_in(locals()), process_group)

    # The learning rate belongs to the line search of all groups, too.
    _own = frozenset({"params", "param_names", "initial_lr"})

    def step(self, closure: Closure | None = None) -> Any:
        """Take up to `max_iter` iterations, within `hodiff.corrected()`, and set gradients.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph. It may zero
                gradients and call backward, as for torch's optimizers, but need not.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no closure, it returns no loss, or loss and gradient are not finite at the
                parameters. Nothing has changed then.
        """
        require_closure(self.caller, closure)
        self.require_dtypes()
        assert closure is not None
        parameters = self.parameters()
        before = [p.detach().clone() for p in parameters]
        try:
            with torch.no_grad(), Corrections(lean=True, many=True):
                return self._iterate(closure, parameters)
        except BaseException:
            with torch.no_grad():
                for parameter, each in zip(parameters, before, strict=True):
                    parameter.copy_(each)
            raise

    def _iterate(self, closure: Closure, parameters: list[Tensor]) -> Any:
        draw = RandomState(parameters)
        loss = self.evaluated_together(closure, by_loss=True)
        used = [p for p in parameters if p.grad is not None]
        if not used:
            return loss  # the closure trains parameters of other optimizers
        objective = _ClosureObjective(self, closure, used, draw)
        point = objective.evaluated(_joined(used), loss)
        require_finite(self.caller, "losses and gradients", [loss, point.slope])
        state = self.state[self.all_parameters()[0]]
        known, places = state.get("inverse_hessian"), _places(used, parameters)
        if known is not None and len(known) != sum(p.numel() for p in parameters):
            known = None  # parameters were frozen, or no longer are
        if known is None:
            own = None
        else:
            own = known.clone() if len(used) == len(parameters) else known[places[:, None], places]
        inverse = InverseHessian(ssbroyden, point.slope, own)
        course = Course(point, point.slope, decrease=0.0 if known is None else state["decrease"])
        options = QuasiNewtonOptions(maxiter=self.setting("max_iter"), gtol=self.setting("tolerance_grad"))
        iterate(objective, options, lambda _: None, course, inverse, float(self.setting("lr")))
        objective.write(course.point.x)
        self.clear_gradients()
        for parameter, gradient in zip(used, _split(course.slope, used), strict=True):
            parameter.grad = gradient
        self._spend()
        if not inverse.fresh:
            matrix = inverse.matrix
            if len(used) < len(parameters):
                matrix = _enlarged(matrix, places, known, sum(p.numel() for p in parameters))
            state.update(inverse_hessian=matrix, decrease=course.decrease)
        return loss

    def dtype_of_state(self, parameter: Tensor) -> torch.dtype:
        """See `StochasticOptimizer`; the inverse Hessian is in float64."""
        return torch.float64

    def shapes_of_state(self, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Shapes:
        """See `StochasticOptimizer`; the inverse Hessian is that of all parameters that are not frozen."""
        size = sum(p.numel() for p in self.parameters())
        return {"inverse_hessian": (size, size), "decrease": ()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as `torch.optim.Optimizer.load_state_dict` does, in float64.

        Args:
            state_dict: Dict that `state_dict` returned.

        Raises:
            InputError: If the state is of another number of parameters, such as with others frozen. Nothing has
                changed then.
        """
        super().load_state_dict(state_dict)
        # torch has rounded it to the dtype of the parameter.
        held = [each["inverse_hessian"] for each in state_dict["state"].values() if "inverse_hessian" in each]
        for state in self.state.values():
            if "inverse_hessian" in state:
                state["inverse_hessian"] = held[0].to(state["inverse_hessian"].device, torch.float64, copy=True)


@dataclass
class _Evaluated:
    """Value and gradient of a closure at a vector; see `hodiff.optimize.recorded_point.Evaluation`."""

    x: Tensor
    value: float
    slope: Tensor

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)

    def release(self) -> None:
        """Keep everything: the closure's graph is gone."""


class _ClosureObjective:
    """Loss of a closure as a function of the vector of some parameters, with equal random numbers at each point."""

    def __init__(self, optimizer: SSBroyden, closure: Closure, parameters: list[Tensor], draw: RandomState):
        self._optimizer, self._closure, self._parameters, self._draw = optimizer, closure, parameters, draw

    def point(self, x: Tensor) -> _Evaluated:
        """Write a vector to the parameters, and evaluate the closure."""
        self.write(x)
        with self._draw.replayed():
            return self.evaluated(x, self._optimizer.evaluated_together(self._closure, by_loss=True))

    def evaluated(self, x: Tensor, loss: Any) -> _Evaluated:
        """Return the point of a vector, whose gradients are in `grad`."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return _Evaluated(x, float(loss), _joined(gradients))

    def write(self, x: Tensor) -> None:
        """Write a vector to the parameters."""
        for parameter, part in zip(self._parameters, _split(x, self._parameters), strict=True):
            parameter.copy_(part)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1).to(torch.float64) for each in tensors])


def _places(some: list[Tensor], parameters: list[Tensor]) -> Tensor:
    """Return the places of some parameters in the vector of all."""
    ids = set(map(id, some))
    chosen = [torch.full((p.numel(),), id(p) in ids, device=p.device) for p in parameters]
    return torch.cat(chosen).nonzero()[:, 0]


def _enlarged(matrix: Tensor, places: Tensor, known: Tensor | None, size: int) -> Tensor:
    """Return the inverse Hessian of all parameters from that of the parameters that the step moved.

    The other parameters keep their block. Without entries between both blocks, the matrix is positive definite.
    """
    if known is None:
        known = torch.eye(size, dtype=matrix.dtype, device=matrix.device) * matrix.diagonal().mean()
    whole = known.clone()
    whole[places], whole[:, places] = 0, 0
    whole[places[:, None], places] = matrix
    return whole


def _split(x: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = x.split([each.numel() for each in like])
    return [part.reshape(each.shape).to(each.dtype) for part, each in zip(parts, like, strict=True)]
