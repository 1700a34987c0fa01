"""Newton's method and Hessian-free optimization by conjugate gradients, for a closure's loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.randomness import RandomState
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.local_models import (
    CURVATURES,
    Closure,
    GaussNewtonModel,
    LocalModel,
    put_gradients,
    require_closure,
)
from hodiff.optim.recorded_losses import explained
from hodiff.optim.settings import settings_in
from hodiff.optim.solvers.solver_settings import NearbyValues, SolverOptimizer, trust_factor
from hodiff.optim.solvers.truncated_newton import Iterate, TruncatedNewtonOptimizer, iterates


class NewtonCG(TruncatedNewtonOptimizer):
    r"""Newton's method with equations solved by conjugate gradients.

    $$ \theta \leftarrow \theta + \gamma\, p, \qquad (B + \mu I)\, p \approx -(g + \lambda \theta), \quad
       B = \nabla^2 f + \lambda I \;\text{ or }\; J^\top \nabla_z^2 \ell\, J + \lambda I $$

    Conjugate gradients stop at the tolerance, or at a direction of curvature zero or less. The step is then the current
    iterate, or, if there is none yet, the direction itself, that of steepest descent. On a positive definite quadratic
    function one step with `lr=1` and enough iterations is exact. Far from a minimum use `damping`, a smaller `lr`, a
    line search, or `HessianFree`. If the loss draws dropout or other random numbers anew in each step, the step solves
    the equations of one draw and is far too long for the next. Without a large `damping` it then diverges, and with a
    line search it makes no progress.

    Args:
        params: Parameters, or groups of them with separate `lr`; real and floating-point.
        lr: $\gamma$, a number or a tensor with one number.
        damping: $\mu$.
        weight_decay: $\lambda$, which adds $\tfrac\lambda2 \|\theta\|^2$ to the loss, for the parameters on which the
            loss depends.
        curvature: "hessian" or "gauss-newton".
        cg_iterations: Maximum number of products in a step.
        cg_tolerance: Norm of the residual, relative to the gradient, at which conjugate gradients end.
        line_search_fn: "backtracking" halves the step, from `lr` on, until the loss falls by 1e-4 of the decrease that
            the slope predicts, with one evaluation of the closure for each trial. If that fails, the parameters do not
            change. None takes the full step.
        maximize: Whether to ascend.
        process_group: Process group of `torch.distributed` whose ranks train this model, such as
            `torch.distributed.group.WORLD`. Loss, gradient and products are means over the ranks. "local" if each rank
            has a model of its own.
            Parameters under `fully_shard` need the group.

    Raises:
        InputError: If a setting is out of its range, a parameter complex or a DTensor without its process group,
            or this process is not in the group.

    Example:
        >>> import torch, hodiff
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = hodiff.optim.NewtonCG([w])
        >>> loss = optimizer.step(lambda: w[0] ** 2 + 10 * (w[1] - w[0] - 1) ** 2)
        >>> torch.allclose(w, torch.tensor([0.0, 1.0]), atol=1e-5)
        True

    Source: J. Nocedal & S. J. Wright, *Numerical Optimization*, 2nd ed., algorithms 3.1 and 7.1; N. N. Schraudolph,
    "Fast curvature matrix-vector products for second-order gradient descent", Neural Computation 14 (2002).
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        damping: float = 0.0,
        weight_decay: float = 0.0,
        *,
        curvature: str = "hessian",
        cg_iterations: int = 100,
        cg_tolerance: float = 1e-6,
        line_search_fn: str | None = None,
        maximize: bool = False,
        process_group: Any = None,
    ):
        super().__init__(params, settings_in(locals()), process_group)

    def _models(self, returned: Any) -> list[LocalModel]:
        return [self.model(returned, self.reached(returned))]

    @property
    def kind(self) -> type[LocalModel]:
        """See `SolverOptimizer`."""
        return CURVATURES[self.setting("curvature")]


# Growth of the numbers of the iterates that backtracking considers.
_SPACING = 1.3
# Number of gradients for the preconditioner, and the power of its damped diagonal.
_DRAWS, _POWER = 8, 0.75
# Relative progress for each iteration below which conjugate gradients stop.
_LEAST_PROGRESS = 5e-4


@dataclass(frozen=True)
class HessianFreeStep:
    """Report of a step.

    Attributes:
        cg_iterations: Number of products with the Gauss-Newton matrix.
        evaluations: Number of evaluations of the closure's loss.
        reduction_ratio: Actual over predicted change of the loss; NaN if the gradient was zero.
        damping: Damping of the step.
        accepted: Whether the loss fell; otherwise the parameters did not change.
    """

    cg_iterations: int
    evaluations: int
    reduction_ratio: float
    damping: float
    accepted: bool


class HessianFree(SolverOptimizer):
    r"""Hessian-free optimization: Gauss-Newton equations by conjugate gradients, with adaptive damping.

    $$ \theta \leftarrow \theta + \gamma\, p, \qquad p \approx \arg\min_p \; q(p) = g^\top p + \tfrac12 p^\top B\, p,
       \quad B = J^\top \nabla_z^2 \ell\, J + (\lambda + \mu) I, \qquad
       \rho = \frac{f(\theta + p) - f(\theta)}{q(p)} $$

    Conjugate gradients start from the last solution and end when q hardly falls any more. Backtracking through their
    iterates ends when an earlier iterate has no lower f. The damping $\mu$ is multiplied by 3/2 if $\rho < 1/4$, and
    by 2/3 if $\rho > 3/4$; a step that raises f is rejected. The method is for large batches: a step needs tens of
    products, which noise would waste. Random numbers repeat in all evaluations of a step, and buffers of batch norm
    change in the first evaluation only.

    Args:
        params: Parameters, or groups of them with separate `lr`; real and floating-point.
        lr: $\gamma$, a number or a tensor with one number.
        damping: Initial $\mu$; it changes in `param_groups`.
        weight_decay: $\lambda$, which adds $\tfrac\lambda2 \|\theta\|^2$ to the loss, for the parameters on which the
            loss depends.
        cg_iterations: Maximum number of products in a step.
        cg_tolerance: Norm of the residual, relative to the gradient, at which conjugate gradients end at the latest.
        warm_start: Factor of the last solution from which conjugate gradients start, 0 to 1.
        preconditioner: "empirical-fisher" preconditions conjugate gradients by $(D + (\lambda + \mu) I)^{3/4}$, with D
            the mean of the examples' squared gradients. D is estimated from eight gradients with random signs of
            examples. Outputs have examples along the first dimension, and the loss is the mean over examples. None for
            the identity.
        process_group: Process group of `torch.distributed` whose ranks train this model, such as
            `torch.distributed.group.WORLD`. Loss, gradient and products are means over the ranks. "local" if each rank
            has a model of its own.
            Parameters under `fully_shard` need the group.

    Attributes:
        last: `HessianFreeStep` of the last step, or None.

    Raises:
        InputError: If a setting is out of its range, a parameter complex or a DTensor without its process group,
            or this process is not in the group.

    Example:
        >>> import torch, hodiff
        >>> inputs, targets = torch.randn(20, 3), torch.randn(20, 1)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = hodiff.optim.HessianFree(model.parameters())
        >>> closure = lambda: (model(inputs), lambda outputs: torch.nn.functional.mse_loss(outputs, targets))
        >>> losses = [optimizer.step(closure).item() for _ in range(3)]
        >>> losses[2] < losses[1] < losses[0], optimizer.last.accepted
        (True, True)

    Source: J. Martens, "Deep learning via Hessian-free optimization", ICML 2010, sections 4.1 to 4.7.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        damping: float = 1.0,
        weight_decay: float = 0.0,
        *,
        cg_iterations: int = 250,
        cg_tolerance: float = 1e-10,
        warm_start: float = 0.95,
        preconditioner: str | None = None,
        process_group: Any = None,
    ):
        self.last: HessianFreeStep | None = None
        super().__init__(params, settings_in(locals()), process_group)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step, which evaluates the closure several times, within `hodiff.corrected()`, and sets gradients.

        Args:
            closure: Function without arguments that returns the pair (outputs, loss): outputs of the model, with their
                graph, and a convex function of them that returns one number.

        Returns:
            The loss before the step, without weight decay.

        Raises:
            InputError: If there is no closure, or it does not return such a pair; or if ranks drift apart.
            RouteError: If torch does not implement a second derivative.
        """
        require_closure(self.caller, closure)
        assert closure is not None
        draw = RandomState(self.parameters())
        (model,) = self.joined(*self.attempted(closure, lambda: self._models(closure)))
        self.agree(model.require_finite)
        put_gradients(model.parameters, model.leaves(model.gradient))
        self._search(model, NearbyValues(self, model.parameters, model, closure, draw))
        return model.loss

    def _models(self, closure: Closure) -> list[LocalModel]:
        self.require_dtypes()
        returned = self.returned(closure)
        return [self.model(returned, self.reached(returned))]

    def _search(self, model: LocalModel, values: NearbyValues) -> None:
        damping, decay = self.setting("damping"), self.setting("weight_decay")
        right = -(model.gradient + decay * model.vector([p.detach() for p in model.parameters]))
        count, kept = self._solve(lambda v: model.product(v) + (decay + damping) * v, right, model)
        best, value = kept[-1], values(model.leaves(kept[-1].x))
        for each in reversed(kept[:-1]):
            earlier = values(model.leaves(each.x))
            if not earlier < value and math.isfinite(value):
                break
            best, value = each, earlier
        gain = value - values.start
        ratio = gain / best.value if best.value else math.nan
        accepted = bool(gain < 0)
        if accepted:
            self.add(model.leaves(best.x), model.parameters)
        what = "solutions of the Gauss-Newton equations"
        self.agree(lambda: require_finite(self.caller, what, [kept[-1].x]))
        for parameter, leaf in zip(model.parameters, model.leaves(kept[-1].x), strict=True):
            self.state[parameter]["solution"] = leaf.clone()
        self.last = HessianFreeStep(count, values.count, ratio, damping, accepted)
        factor = trust_factor(ratio) if best.value else 1.0
        factor = factor if accepted else max(factor, 1.0)
        for group in self.param_groups:
            group["damping"] = damping * factor

    def _solve(
        self, product: Callable[[Tensor], Tensor], right: Tensor, model: LocalModel
    ) -> tuple[int, list[Iterate]]:
        """Run conjugate gradients; return the number of steps and the iterates for backtracking, in order."""
        parts = [self.state[p].get("solution") for p in model.parameters]
        warm = None if any(part is None for part in parts) else self.setting("warm_start") * model.vector(parts)
        enough = self.setting("cg_tolerance") * model.inner.norm(right)
        values: list[float] = []
        kept: list[Iterate] = []
        mark = 1.0
        with explained(self.caller):
            for each in iterates(product, right, model.inner, warm, self._preconditioner(model)):
                values.append(each.value)
                if each.count >= mark:
                    kept.append(each)
                    mark = max(math.ceil(mark * _SPACING), mark + 1)
                if each.residual <= enough or each.count >= self.setting("cg_iterations") or _stalls(values):
                    break
        return each.count, [*(one for one in kept if one.count != each.count), each]

    def _preconditioner(self, model: LocalModel) -> Tensor | None:
        if self.setting("preconditioner") is None:
            return None
        assert isinstance(model, GaussNewtonModel)
        # The signs repeat in all steps: batches change anyway, and no state has to be stored.
        shift = self.setting("weight_decay") + self.setting("damping")
        diagonal, unit = model.squared_gradients(_DRAWS, torch.Generator().manual_seed(0), shift**0.5)
        damped = diagonal + shift / unit**2
        # Entries that are zero beside the largest carry no information.
        largest = model.inner.largest(damped)
        return damped.clamp_min(torch.finfo(damped.dtype).eps * largest) ** _POWER if largest > 0 else None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "last": self.last}


def _stalls(values: list[float]) -> bool:
    """Apply Martens' rule to the relative progress over the last tenth of the iterations, at least ten."""
    i = len(values) - 1
    k = max(10, i // 10)
    return i > k and values[-1] < 0 and (values[-1] - values[-1 - k]) / values[-1] < k * _LEAST_PROGRESS
