"""Gauss-Newton method with a block of the matrix for each layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hodiff.optim.local_models import LocalModel
from hodiff.optim.settings import settings_in
from hodiff.optim.solvers.solver_settings import trust_factor
from hodiff.optim.solvers.truncated_newton import TruncatedNewtonOptimizer


class LayerwiseGaussNewton(TruncatedNewtonOptimizer):
    r"""Gauss-Newton steps of each layer with all other layers fixed: exact diagonal blocks of the matrix.

    $$ \theta_l \leftarrow \theta_l + \gamma\, p_l, \qquad
       \big(J_l^\top \nabla_z^2 \ell\, J_l + (\lambda + \mu) I\big)\, p_l \approx -(g_l + \lambda \theta_l) $$

    with $J_l$ the Jacobian of the model's outputs z in the parameters of layer l, all at the same point. Conjugate
    gradients solve each layer's equations, which K-FAC approximates by two small matrices. The method shows the
    potential of layerwise methods, at the price of a Gauss-Newton product for each layer and iteration. Each layer
    corrects the outputs as if the other layers were fixed, so the joint step is too long: a line search shortens it.

    Named parameters, `model.named_parameters()`, belong to one layer if their names differ in the last part only, such
    as those of a weight and its bias. Without names each parameter is a layer.

    Args:
        params: Named parameters, parameters, or groups of them with separate `lr`; real and floating-point.
        lr: $\gamma$, a number or a tensor with one number.
        damping: $\mu$. None begins at 1 and, with a line search, adapts in `param_groups`. The damping is multiplied by
            3/2 if the whole step gains less than a quarter of what the models of all layers predict, and by 2/3 if it
            gains more than three quarters. At 0 the equations of a layer with more parameters than the batch has
            outputs are singular, and rounding determines the step.
        weight_decay: $\lambda$, which adds $\tfrac\lambda2 \|\theta\|^2$ to the loss, for the parameters on which the
            loss depends.
        cg_iterations: Maximum number of products in a step of a layer.
        cg_tolerance: Norm of the residual, relative to the gradient, at which conjugate gradients end, in each layer.
        line_search_fn: "backtracking" halves the joint step of all layers, from `lr` on, until the loss falls by 1e-4
            of the decrease that the slope predicts. If that fails, the parameters do not change. None takes the full
            step.
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
        process_group: Any = None,
    ):
        self._adapts = damping is None
        damping = 1.0 if damping is None else damping
        super().__init__(params, settings_in(locals()), process_group)

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
        """Group trainable parameters by module: by names without the last part; each unnamed parameter is a group."""
        layers: dict[Any, list[Tensor]] = {}
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.requires_grad:
                    key = id(parameter) if name is None else name.rpartition(".")[0]
                    layers.setdefault(key, []).append(parameter)
        return list(layers.values())
