"""Sophia: steps of momentum over curvature, clipped in each coordinate; with two estimates of the curvature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.estimators.probes import PROBES
from hodiff.optim.diagonal_curvature import DiagonalOptimizer, HutchinsonOptimizer
from hodiff.optim.local_models import Closure
from hodiff.optim.pending_curvature import Estimates
from hodiff.optim.recorded_losses import drawn_from_logits, drawn_from_loss
from hodiff.optim.settings import settings_in
from hodiff.optim.training_optimizer import Group, zeros_of_each
from hodiff.torch_internals import many_tensors as many


class _Sophia(DiagonalOptimizer):
    """Step of both Sophia optimizers."""

    whole_state = frozenset({"curvature", "refreshes"})

    def _absorb(self, parameter: Tensor, group: Group, curvature: Tensor) -> None:
        state, beta = self.state[parameter], group["betas"][1]
        if "curvature" not in state:
            state["curvature"] = torch.zeros_like(parameter)
        state["curvature"].lerp_(curvature, 1 - beta)

    def _move(self, parameter: Tensor, group: Group, gradient: Tensor) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average = state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        # The sign of the curvature follows the function that is minimised.
        factor = -group["gamma"] if group["maximize"] and self._signed else group["gamma"]
        # float16 does not hold the paper's 1e-12.
        least = max(group["eps"], torch.finfo(parameter.dtype).tiny)
        direction = average / (state["curvature"] * factor).clamp_(min=least)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(direction.clamp_(-1, 1).mul_(group["lr"]))

    def _move_all(self, parameters: list[Tensor], group: Group, gradients: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        averages = zeros_of_each(states, "exp_avg", parameters)
        many.lerp_(averages, gradients, 1 - group["betas"][0])
        factor = -group["gamma"] if group["maximize"] and self._signed else group["gamma"]
        scales = many.mul([state["curvature"] for state in states], factor)
        many.clamp_min_(scales, max(group["eps"], torch.finfo(parameters[0].dtype).tiny))
        directions = many.div(averages, scales)
        if group["weight_decay"]:
            many.mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        many.clamp_min_(directions, -1)
        many.clamp_max_(directions, 1)
        many.mul_(directions, group["lr"])
        many.sub_(parameters, directions)

    # Whether maximising changes the sign of the estimate.
    _signed = True


class SophiaH(_Sophia, HutchinsonOptimizer):
    r"""Momentum over a moving average of the Hessian's diagonal, clipped in each coordinate.

    $$ m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad
       h_t = \beta_2 h_{t-k} + (1 - \beta_2)\, u \circ H u \;\text{ every k steps}, $$
    $$ \theta \leftarrow (1 - \gamma_{lr} \lambda)\, \theta - \gamma_{lr}\,
       \mathrm{clip}\Big( \frac{m_t}{\max(\gamma h_t, \epsilon)},\; 1 \Big) $$

    with a random u. No coordinate moves by more than the learning rate; coordinates of negative curvature move by all
    of it. In a script, replace `torch.optim.Adam(model.parameters())` by `hodiff.optim.SophiaH(model.parameters())`.
    Nothing else changes: every k steps `loss.backward()` passes its graph to the optimizer. docs/guides/optimizers.md
    explains the mechanism and its cost.

    Args:
        params: Parameters, or groups of them with separate settings, as for `torch.optim.Adam`; real and
            floating-point.
        lr: Learning rate $\gamma_{lr}$, a number or a tensor with one number: the longest step of a coordinate.
        betas: $\beta_1$ and $\beta_2$.
        gamma: $\gamma$; smaller values clip more coordinates. The paper chooses it so that a tenth to a half of the
            coordinates is not clipped.
        eps: $\epsilon$.
        weight_decay: $\lambda$, decoupled.
        update_every: k; None for `update_curvature` only.
        maximize: Whether to ascend.
        foreach: Whether multi-tensor operators update the parameters of a group together, which needs memory for the
            temporaries of all. None does so for parameters of less than 65,536 numbers, where calls dominate the time.
        probes: "gaussian", "rademacher" (signs) or "sphere".
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
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = hodiff.optim.SophiaH([w], lr=0.25)
        >>> (w**2).sum().backward()
        >>> optimizer.step()
        >>> w.detach()
        tensor([ 0.7500, -1.7500])

    Source: H. Liu et al., "Sophia: a scalable stochastic second-order optimizer for language model pre-training", ICLR
    2024, algorithms 1 and 3.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.96, 0.99),
        gamma: float = 0.01,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        update_every: int | None = 10,
        maximize: bool = False,
        foreach: bool | None = None,
        probes: str = "gaussian",
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ):
        require_choice(self.caller, "probes", probes, PROBES)
        super().__init__(params, settings_in(locals()), probes, generator, process_group)


class SophiaG(_Sophia):
    r"""Sophia for classifiers, with the Gauss-Newton-Bartlett estimate of the curvature.

    $$ \hat h = B\, \hat g \circ \hat g, \qquad
       \hat g = \nabla_\theta \frac1B \sum_{b=1}^B \ell(z_b, \hat y_b), \quad \hat y_b \sim \mathrm{softmax}(z_b) $$

    The estimate is of the diagonal of the Gauss-Newton matrix, is never negative, and needs no second derivative. The
    step is that of `SophiaH`. In a loop of `loss.backward()` and `optimizer.step()` the logits are found in the graph
    of the loss. The loss must have one `cross_entropy` or `nll_loss` of labels, without class weights, of reduction
    "mean" or "sum"; for any other loss call `update_curvature(logits)`. Every row of logits is an example, also of a
    token. A parameter on which the loss depends, but not the logits, has zero curvature and moves by the learning rate.

    Args:
        params: Parameters as in `SophiaH`; so are the other settings.
        lr: Learning rate, the longest step of a coordinate.
        betas: $\beta_1$ and $\beta_2$.
        gamma: $\gamma$.
        eps: $\epsilon$.
        weight_decay: $\lambda$.
        update_every: k.
        maximize: Whether to ascend.
        foreach: Whether to use multi-tensor operators, as in `SophiaH`.
        generator: Generator on the CPU that draws labels; by default a new generator with seed 0.
        process_group: Process group, as in `SophiaH`; every rank draws labels of its own.

    Raises:
        InputError: If a setting is out of its range, a parameter complex or a DTensor without its process group,
            or this process is not in the group.

    Example:
        >>> import torch, hodiff
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = hodiff.optim.SophiaG(model.parameters(), lr=0.1)
        >>> torch.nn.functional.cross_entropy(model(torch.ones(4, 2)), torch.tensor([0, 1, 2, 1])).backward()
        >>> optimizer.step()

    Source: H. Liu et al., "Sophia: a scalable stochastic second-order optimizer for language model pre-training", ICLR
    2024, algorithms 2 and 3.
    """

    second_order = _signed = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.96, 0.99),
        gamma: float = 0.05,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        update_every: int | None = 10,
        maximize: bool = False,
        foreach: bool | None = None,
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ):
        super().__init__(params, settings_in(locals()), generator, process_group)

    def update_curvature(self, logits: Tensor | Closure) -> None:
        """Estimate the curvature of the mean cross-entropy of logits now, whether due or not.

        The graph of the logits stays, so that `loss.backward()` can follow; gradients do not change.

        Args:
            logits: A tensor of floating-point numbers (N, C, ...) or (C,), with its graph on the parameters. Or a
                closure that returns a cross-entropy and does not call backward, which sharded parameters require.

        Raises:
            InputError: If the logits are not such a tensor, or embeddings with `scale_grad_by_freq` use a parameter.
        """
        if self.sharded or callable(logits):
            super().update_curvature(logits)
            return
        if not isinstance(logits, Tensor) or not logits.dim() or not logits.is_floating_point():
            raise InputError(f"{self.caller}: update_curvature: expected logits (N, C, ...), got {describe(logits)}.")
        if not logits.requires_grad:
            raise InputError(
                f"{self.caller}: update_curvature: expected logits with their graph, got none; pass model(inputs) "
                "before loss.backward()."
            )
        with torch.enable_grad():
            self._update(logits)

    def _estimate(self, loss: Tensor, parameters: Sequence[Tensor], last: bool) -> tuple[Estimates, Estimates]:
        generator = self._own_draws()
        # A loss has no dimensions; logits from `update_curvature` have a dimension of classes.
        if loss.dim():
            gradients, factor = drawn_from_logits(self.caller, loss, parameters, generator)
            reached = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        else:
            leaves = self._leaves_of(parameters)
            gradients, factor = drawn_from_loss(self.caller, loss, leaves, generator, joint=self.sharded)
            # The loss depends on all of these parameters, though not always through its logits.
            zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients, strict=True))
            reached = list(zip(parameters, zeros, strict=True))
        if self._ranks.size > 1 and not self.sharded:
            return [(p, _Root((factor**0.5 * g).to(g.dtype))) for p, g in reached], []
        # A factor of shape () would promote a parameter of shape () to the dtype of the loss.
        return [(p, (factor * g.square()).to(g.dtype)) for p, g in reached], []

    def _summed(self, estimates: dict[int, Any]) -> dict[int, Any]:
        if self.sharded:
            return super()._summed(estimates)
        sums = {id(p): estimates[id(p)].gradients.clone() for p in self.parameters() if id(p) in estimates}
        self._ranks.sum_(list(sums.values()))
        return {key: each.square() / self._ranks.size for key, each in sums.items()}

    def _numbers_of(self, estimate: Any) -> list[Tensor]:
        return [estimate.gradients if isinstance(estimate, _Root) else estimate]


@dataclass(frozen=True, eq=False)
class _Root:
    r"""Gradients of one rank or of several losses, whose joint square estimates the curvature.

    The labels of different ranks and losses are drawn independently, so that products of their gradients vanish in the
    mean. The square of a sum of all gradients is the estimate of one process.
    """

    gradients: Tensor

    def __add__(self, other: _Root) -> _Root:
        return _Root(self.gradients + other.gradients)

    def __mul__(self, factor: float | Tensor) -> _Root:
        return _Root(self.gradients * float(factor) ** 0.5)
