"""Muon: momentum, orthogonalized for matrices; Adam for all other parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.optim.finite_numbers import require_norms
from hodiff.optim.local_models import Closure
from hodiff.optim.optimizer_states import precise
from hodiff.optim.settings import SHAPE, settings_in
from hodiff.optim.training_optimizer import Group, StochasticOptimizer

# The polynomial a x + b x^3 + c x^5 of the Newton-Schulz iteration.
COEFFICIENTS = 3.4445, -4.7750, 2.0315


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    r"""Move the singular values of a matrix towards 1, to about [0.7, 1.2], by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    X = matrix if wide else matrix.mT
    # Squares of tiny numbers would vanish in the norm.
    X = X / X.abs().amax().clamp(min=torch.finfo(X.dtype).tiny)
    X = X / X.norm().clamp(min=torch.finfo(X.dtype).tiny)
    for _ in range(steps):
        S = X @ X.mT
        X = torch.addmm(X, torch.addmm(S, S, S, beta=b, alpha=c), X, beta=a)
    return X if wide else X.mT


class Muon(StochasticOptimizer):
    r"""Momentum whose matrices are replaced by nearly orthogonal matrices; Adam for parameters that are no matrices.

    For a matrix of shape (p, q),

    $$ M \leftarrow \mu M + (1 - \mu)\, G, \qquad O = \mathrm{NS}_k\big((1 - \mu)\, G + \mu M\big), \qquad
       \theta \leftarrow (1 - \gamma \lambda)\, \theta - \gamma s\, O $$

    $$ \mathrm{NS}_k: \; X_0 = \frac{X}{\|X\|_F}, \quad
       X_{j+1} = a X_j + b\, X_j X_j^\top X_j + c\, (X_j X_j^\top)^2 X_j, \quad
       (a, b, c) = (3.4445, -4.775, 2.0315) $$

    With the singular value decomposition $X = U \Sigma V^\top$, NS returns $U \Sigma' V^\top$ with $\Sigma'$ between
    0.7 and 1.2, except for singular values that are a small fraction of the norm. The factor s is
    $0.2 \sqrt{\max(p, q)}$ for `scaling="rms"`, so that steps have about the size of Adam's and its learning rates and
    weight decays carry over; it is $\sqrt{\max(1, p / q)}$ for `scaling="shape"`, the original rule.

    Parameters of one dimension, and groups with `orthogonalize=False`, take Adam's steps with the same learning rate.
    Use such a group for embeddings and output layers. Parameters of more than two dimensions are matrices of the first
    dimension times all others.

    Args:
        params: Parameters, or groups of them with separate settings, as for `torch.optim.Adam`; real and
            floating-point.
        lr: Learning rate $\gamma$, a number or a tensor with one number.
        momentum: $\mu$.
        weight_decay: $\lambda$, decoupled, also for Adam.
        orthogonalize: Whether matrices are orthogonalized; if false, they take Adam's steps.
        scaling: "rms" or "shape".
        nesterov: Whether NS is applied to $(1 - \mu) G + \mu M$ (Nesterov's momentum) or to M.
        iterations: k.
        betas: $\beta_1$ and $\beta_2$ of Adam.
        eps: $\epsilon$ of Adam.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> inputs, targets = torch.randn(20, 3), torch.randn(20, 2)
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = hodiff.optim.Muon(model.parameters(), lr=0.05)
        >>> closure = lambda: torch.nn.functional.mse_loss(model(inputs), targets)
        >>> losses = [optimizer.step(closure).item() for _ in range(20)]
        >>> losses[-1] < losses[0]
        True

    Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), algorithm 2; J. Liu et
    al., "Muon is scalable for LLM training", arXiv:2502.16982 (2025), eq. 4.
    """

    precise_state = True
    whole_state = frozenset({"step", "exp_avg"})
    # The iteration multiplies whole matrices.
    sharded_by_group = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        orthogonalize: bool = True,
        scaling: str = "rms",
        nesterov: bool = True,
        iterations: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        maximize: bool = False,
    ):
        super().__init__(params, settings_in(locals()))

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
        found = [(group, [pair for pair in self.gradients(group) if pair[0].numel()]) for group in self.param_groups]
        require_norms(self.caller, [(precise(g), float(group["eps"])) for group, pairs in found for _, g in pairs])
        for group, pairs in found:
            for parameter, gradient in pairs:
                self._move(parameter, group, precise(gradient))
        return loss

    def _move(self, parameter: Tensor, group: Group, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["exp_avg"] = 0, torch.zeros_like(gradient)
        state["step"] += 1
        matrix = parameter.dim() > 1 and group["orthogonalize"]
        direction = (_muon if matrix else _adam)(state, group, gradient)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_((direction * group["lr"]).to(parameter.dtype))


def _muon(state: dict[str, Any], group: Group, gradient: Tensor) -> Tensor:
    average = state["exp_avg"].lerp_(gradient, 1 - group["momentum"])
    mean = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
    found = orthogonalized(mean.flatten(1), group["iterations"])
    p, q = found.shape
    scale = max(1.0, p / q) ** 0.5 if group["scaling"] == SHAPE else 0.2 * max(p, q) ** 0.5
    return (scale * found).view_as(gradient)


def _adam(state: dict[str, Any], group: Group, gradient: Tensor) -> Tensor:
    beta1, beta2 = group["betas"]
    if "exp_avg_sq" not in state:
        state["exp_avg_sq"] = torch.zeros_like(gradient)
    average = state["exp_avg"].lerp_(gradient, 1 - beta1)
    squares = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scales = (squares / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    return (average / (1 - beta1 ** state["step"])).div_(scales)
