"""Hessian-free optimization: Gauss-Newton steps by conjugate gradients, trusted as far as they proved right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.randomness import RandomState
from hodiff.optim.stochastic.closures import Closure, require_closure
from hodiff.optim.stochastic.found_graphs import explained
from hodiff.optim.stochastic.local_models import GaussNewtonModel, LocalModel, put_gradients
from hodiff.optim.stochastic.magnitudes import norm_of, require_finite
from hodiff.optim.stochastic.settings import settings_in
from hodiff.optim.stochastic.solvers.conjugate_gradients import Iterate, iterates
from hodiff.optim.stochastic.solvers.nearby_values import NearbyValues
from hodiff.optim.stochastic.solvers.solver_settings import SolverOptimizer, trust_factor

# Iterates that backtracking looks at have numbers that grow by this factor.
_SPACING = 1.3
# Gradients that the preconditioner is made of, and the power of its damped diagonal.
_DRAWS, _POWER = 8, 0.75
# Progress below this share of the value, for each iteration, ends the iterations.
_LEAST_PROGRESS = 5e-4


@dataclass(frozen=True)
class HessianFreeStep:
    """What a step did.

    Attributes:
        cg_iterations: Products with the Gauss-Newton matrix.
        evaluations: Values of the closure's loss.
        reduction_ratio: What the loss lost over what the model promised; NaN where the gradient was zero.
        damping: The damping that the step was made with.
        accepted: Whether the loss fell; else the parameters stayed.
    """

    cg_iterations: int
    evaluations: int
    reduction_ratio: float
    damping: float
    accepted: bool


class HessianFree(SolverOptimizer):
    r"""Hessian-free optimization: Gauss-Newton equations by conjugate gradients, with damping that adapts itself.

    $$ \theta \leftarrow \theta + \gamma\, p, \qquad p \approx \arg\min_p \; q(p) = g^\top p + \tfrac12 p^\top B\, p,
       \quad B = J^\top \nabla_z^2 \ell\, J + (\lambda + \mu) I, \qquad
       \rho = \frac{f(\theta + p) - f(\theta)}{q(p)} $$

    Conjugate gradients start from the last solution and end where q hardly falls any more; of their iterates the
    last one is taken before which f is no smaller. The damping $\mu$ becomes 3/2 of itself where $\rho < 1/4$, and 2/3
    where $\rho > 3/4$; a step that raises f is not made. It is for large batches: a step takes tens of products, which
    noise would waste. Random numbers repeat in all evaluations of a step, and buffers of batch norm change in the first
    only.

    Args:
        params: Parameters, or groups of them with an `lr` of their own; real and floating-point.
        lr: $\gamma$, a number or a tensor of one.
        damping: $\mu$ at the beginning; it changes in `param_groups`.
        weight_decay: $\lambda$, which stands for $\tfrac\lambda2 \|\theta\|^2$ beside the loss, for the
            parameters that it uses.
        cg_iterations: The most products in a step.
        cg_tolerance: Where conjugate gradients stop at the latest: norm of the residual over that of the gradient.
        warm_start: Which part of the last solution they start from, 0 to 1.
        preconditioner: "empirical-fisher" has conjugate gradients preconditioned by $(D + (\lambda + \mu) I)^{3/4}$,
            with D the mean of the squared gradients of examples, from eight gradients with random signs of examples,
            which lie along the first dimension of the outputs; of a loss that is their mean. None for the identity.

    Attributes:
        last: A `HessianFreeStep` of what the last step did, or None.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

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
    ):
        self.last: HessianFreeStep | None = None
        super().__init__(params, settings_in(locals()))

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step, which evaluates the closure several times, within `hodiff.corrected()`, and sets gradients.

        Args:
            closure: Function without arguments that returns the pair (outputs, loss): outputs of the model, with their
                graph, and a function of them, convex, that returns one number.

        Returns:
            The loss before the step, without weight decay.

        Raises:
            InputError: If there is no closure, or it does not return that.
            RouteError: If torch does not implement a second derivative.
        """
        require_closure(self.caller, closure)
        assert closure is not None
        self.require_dtypes()
        draw = RandomState(self.parameters())
        returned = self.returned(closure)
        model = self.model(returned, self.reached(returned))
        model.require_finite()
        put_gradients(model.parameters, model.leaves(model.gradient))
        self._search(model, NearbyValues(self, model.parameters, model.loss, closure, draw))
        return model.loss

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
        require_finite(self.caller, "solutions of the Gauss-Newton equations", [kept[-1].x])
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
        """Conjugate gradients: how many steps, and the iterates that backtracking may return to, the last one last."""
        parts = [self.state[p].get("solution") for p in model.parameters]
        warm = None if any(part is None for part in parts) else self.setting("warm_start") * model.vector(parts)
        enough = self.setting("cg_tolerance") * norm_of(right)
        values: list[float] = []
        kept: list[Iterate] = []
        mark = 1.0
        with explained(self.caller):
            for each in iterates(product, right, warm, self._preconditioner(model)):
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
        # The same signs in each step: batches change, and there is no state to store.
        shift = self.setting("weight_decay") + self.setting("damping")
        diagonal, unit = model.squared_gradients(_DRAWS, torch.Generator().manual_seed(0), shift**0.5)
        damped = diagonal + shift / unit**2
        # Nothing is told by what is zero beside the largest.
        largest = damped.max() if damped.numel() else torch.zeros(())
        return damped.clamp_min(torch.finfo(damped.dtype).eps * float(largest)) ** _POWER if largest > 0 else None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "last": self.last}


def _stalls(values: list[float]) -> bool:
    """Martens' rule: relative progress over the last tenth of the iterations, or ten of them."""
    i = len(values) - 1
    k = max(10, i // 10)
    return i > k and values[-1] < 0 and (values[-1] - values[-1 - k]) / values[-1] < k * _LEAST_PROGRESS
