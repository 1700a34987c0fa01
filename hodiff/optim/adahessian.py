"""AdaHessian: Adam with the diagonal of the Hessian instead of the squared gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.estimators.probes import PROBES
from hodiff.optim.diagonal_curvature import HutchinsonOptimizer
from hodiff.optim.optimizer_states import precise
from hodiff.optim.pending_curvature import Estimates
from hodiff.optim.settings import settings_in
from hodiff.optim.training_optimizer import Group, zeros_of_each
from hodiff.torch_internals import many_tensors as many


class AdaHessian(HutchinsonOptimizer):
    r"""Adam with squares of the Hessian's diagonal instead of squares of the gradient.

    $$ m_t = \frac{(1 - \beta_1) \sum_{i \le t} \beta_1^{t-i} g_i}{1 - \beta_1^t}, \quad
       v_t^2 = \frac{(1 - \beta_2) \sum_{i \le s} \beta_2^{s-i} D_i \circ D_i}{1 - \beta_2^s}, \quad
       \theta \leftarrow \theta - \gamma \Big( \frac{m_t}{v_t^{\kappa} + \epsilon} + \lambda \theta \Big) $$

    with $D = z \circ H z$ for random signs z, averaged over each kernel of a convolution; s counts the estimates. A
    loop of `loss.backward()` and `optimizer.step()` is enough: `backward` passes its graph to the optimizer. The state
    has at least 32 bits, because squares leave the range of float16.
    docs/guides/optimizers.md explains the mechanism and its cost.

    Args:
        params: Parameters, or groups of them with separate settings, as for `torch.optim.Adam`; real and
            floating-point.
        lr: Learning rate $\gamma$, a number or a tensor with one number.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$, decoupled.
        hessian_power: $\kappa$, from 0 to 1.
        spatial_averaging: Whether to average $D$ over all but the first two dimensions of a parameter.
        update_every: Number of steps between estimates of the curvature; None for `update_curvature` only.
        maximize: Whether to ascend.
        foreach: Whether multi-tensor operators update the parameters of a group together, which needs memory for the
            temporaries of all. None does so for parameters of less than 65,536 numbers, where calls dominate the time.
        probes: "rademacher" (signs), "gaussian" or "sphere".
        generator: Source of random numbers; by default a new generator with seed 0.
        process_group: Process group of `torch.distributed` whose ranks train this model, such as
            `torch.distributed.group.WORLD`. The loss is the mean of the ranks' losses, and its gradient and curvature
            are those of the step; generators must be equal on all ranks. "local" if each rank has a model of its own.
            Parameters under `fully_shard` need the group.

    Raises:
        InputError: If a setting is out of its range, a parameter complex or a DTensor without its process group,
            or this process is not in the group.

    Example:
        >>> import torch, hodiff
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = hodiff.optim.AdaHessian([w], lr=1.0)
        >>> (w**2).sum().backward()
        >>> optimizer.step()
        >>> w.detach().round(decimals=3)
        tensor([0., 0.])

    Source: Z. Yao et al., "ADAHESSIAN: an adaptive second order optimizer for machine learning", AAAI 2021, algorithm
    1, eq. 9 to 11.
    """

    precise_state = True
    whole_state = frozenset({"curvature_sq", "refreshes"})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        *,
        hessian_power: float = 1.0,
        spatial_averaging: bool = True,
        update_every: int | None = 1,
        maximize: bool = False,
        foreach: bool | None = None,
        probes: str = "rademacher",
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ):
        require_choice(self.caller, "probes", probes, PROBES)
        super().__init__(params, settings_in(locals()), probes, generator, process_group)

    def _estimate(self, loss: Tensor, parameters: Sequence[Tensor], last: bool) -> tuple[Estimates, Estimates]:
        estimates, gradients = super()._estimate(loss, parameters, last)
        return [(p, precise(h)) for p, h in estimates], gradients

    @property
    def _squares_from(self) -> float:
        # Smaller squares are negligible beside eps.
        return min(g["eps"] ** (1 / g["hessian_power"]) if g["hessian_power"] else math.inf for g in self.param_groups)

    def _absorb(self, parameter: Tensor, group: Group, curvature: Tensor) -> None:
        if group["spatial_averaging"] and parameter.dim() > 2:
            curvature = curvature.mean(dim=tuple(range(2, parameter.dim())), keepdim=True).expand_as(parameter)
        state, beta = self.state[parameter], group["betas"][1]
        if "curvature_sq" not in state:
            state["curvature_sq"] = torch.zeros_like(parameter, dtype=curvature.dtype)
        state["curvature_sq"].mul_(beta).addcmul_(curvature, curvature, value=1 - beta)

    def _move(self, parameter: Tensor, group: Group, gradient: Tensor) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if "exp_avg" not in state:
            state["step"], state["exp_avg"] = 0, torch.zeros_like(parameter, dtype=self.dtype_of_state(parameter))
        state["step"] += 1
        average = state["exp_avg"].lerp_(precise(gradient), 1 - beta1)
        mean_square = state["curvature_sq"] / (1 - beta2 ** state["refreshes"])
        scale = mean_square.pow_(0.5 * group["hessian_power"]).add_(group["eps"])
        direction = (average / (1 - beta1 ** state["step"])).div_(scale)
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        parameter.sub_(direction.mul_(group["lr"]))

    def _move_all(self, parameters: list[Tensor], group: Group, gradients: list[Tensor]) -> None:
        states, (beta1, beta2) = [self.state[p] for p in parameters], group["betas"]
        gradients = [precise(g) for g in gradients]
        averages = zeros_of_each(states, "exp_avg", gradients)
        for state in states:
            state["step"] = state.get("step", 0) + 1
        many.lerp_(averages, gradients, 1 - beta1)
        scales = many.div([s["curvature_sq"] for s in states], [1 - beta2 ** s["refreshes"] for s in states])
        many.pow_(scales, 0.5 * group["hessian_power"])
        many.add_(scales, group["eps"])
        directions = many.div(averages, [1 - beta1 ** s["step"] for s in states])
        many.div_(directions, scales)
        if group["weight_decay"]:
            many.add_(directions, parameters, alpha=group["weight_decay"])
        many.mul_(directions, group["lr"])
        many.sub_(parameters, directions)
