"""The Gauss-Newton method with each layer's own block of the matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hodiff.optim.stochastic.local_models import LocalModel
from hodiff.optim.stochastic.settings import settings_in
from hodiff.optim.stochastic.solvers.solver_settings import trust_factor
from hodiff.optim.stochastic.solvers.truncated_newton import TruncatedNewtonOptimizer


class LayerwiseGaussNewton(TruncatedNewtonOptimizer):
    r"""Gauss-Newton steps of each layer, as if all others stayed: blocks of the exact matrix, without an approximation.

    $$ \theta_l \leftarrow \theta_l + \gamma\, p_l, \qquad
       \big(J_l^\top \nabla_z^2 \ell\, J_l + (\lambda + \mu) I\big)\, p_l \approx -(g_l + \lambda \theta_l) $$

    with $J_l$ the Jacobian of the model's outputs z in the parameters of layer l, all at the same point. Conjugate
    gradients solve each layer's equations, which is what K-FAC approximates by two small matrices; it shows how far a
    method by layers can come, at the price of a product with the Gauss-Newton matrix for each layer and iteration. As
    each layer mends the outputs as if no other one did, all steps together are too long: a line search shortens them.

    Parameters with names, `model.named_parameters()`, are of one layer where the names differ in their last part only,
    as those of a weight and its bias; without names each is a layer.

    Args:
        params: Named parameters, parameters, or groups of them with an `lr` of their own; real and floating-point.
        lr: $\gamma$, a number or a tensor of one.
        damping: $\mu$. None begins at 1 and, with a line search, adapts in `param_groups`: to 3/2 of itself where the
            whole step gains less than a quarter of what the models of all layers promise, and to 2/3 where it gains
            more than three quarters. At 0 the equations of a layer that has more parameters than the batch has outputs
            are singular, and rounding decides where a step leads.
        weight_decay: $\lambda$, which stands for $\tfrac\lambda2 \|\theta\|^2$ beside the loss, for the
            parameters that it uses.
        cg_iterations: The most products in a step of a layer.
        cg_tolerance: Where to stop: norm of the residual over that of the gradient, in each layer.
        line_search_fn: "backtracking" halves the step of all layers together, from `lr` on, until the loss falls by
            1e-4 of what the slope promises, and stays where it is if it does not; None takes the step.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> inputs, targets = torch.randn(20, 3), torch.randn(20, 1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> optimizer = hodiff.optim.LayerwiseGaussNewton(model.named_parameters(), damping=1e-3)
        >>> closure = lambda: (model(inputs), lambda outputs: torch.nn.functional.mse_loss(outputs, targets))
        >>> losses = [optimizer.step(closure).item() for _ in range(3)]
        >>> losses[2] < losses[1] < losses[0]
        True

    Source: N. Abreu, N. Vyas, S. Kakade & D. Morwani, "The potential of second-order optimization for LLMs: a study
    with full Gauss-Newton", ICLR 2026: the layerwise method.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        damping: float | None = None,
        weight_decay: float = 0.0,
        *,
        cg_iterations: int = 100,
        cg_tolerance: float = 1e-6,
        line_search_fn: str | None = "backtracking",
        maximize: bool = False,
    ):
        self._adapts = damping is None
        damping = 1.0 if damping is None else damping
        super().__init__(params, settings_in(locals()))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adapts": self._adapts}

    def _trust(self, gain: float, promised: float) -> None:
        if promised and self._adapts:
            factor = trust_factor(gain / promised)
            for group in self.param_groups:
                group["damping"] *= factor

    def _models(self, returned: Any) -> list[LocalModel]:
        reached = set(map(id, self.reached(returned)))
        layers = [[p for p in layer if id(p) in reached] for layer in self._layers()]
        return [self.model(returned, layer) for layer in layers if layer]

    def _layers(self) -> list[list[Tensor]]:
        """Parameters by what their names begin with."""
        layers: dict[Any, list[Tensor]] = {}
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.requires_grad:
                    key = id(parameter) if name is None else name.rpartition(".")[0]
                    layers.setdefault(key, []).append(parameter)
        return list(layers.values())
