"""Shampoo: a root of a second-moment matrix for each dimension of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.optim.grafting import LEAST, WITH_SQUARES
from hodiff.optim.kronecker.kronecker_optimizer import (
    KroneckerOptimizer,
    State,
    inverse_root,
    multiplied,
    sizes_of,
    stacked,
)
from hodiff.optim.settings import is_due, settings_in
from hodiff.optim.training_optimizer import Group


class Shampoo(KroneckerOptimizer):
    r"""Optimizer that multiplies gradients by inverse roots of their second moments along each dimension.

    For a parameter of k dimensions, with $G_{(i)}$ the matrix of all vectors along dimension i as columns,

    $$ M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad
       L_i \leftarrow \beta_2 L_i + (1 - \beta_2)\, G_{(i)} G_{(i)}^\top, \qquad
       P = \hat M \times_1 R_1 \cdots \times_k R_k, \quad
       R_i = \big(\hat L_i + \epsilon\, \lambda_{\max}(\hat L_i) I\big)^{-1/2k} $$

    $$ \theta \leftarrow (1 - \gamma \lambda)\, \theta - \gamma\, \frac{\|S\|}{\|P\|}\, P $$

    with bias-corrected averages $\hat M, \hat L$. For a matrix, P is $L^{-1/4} \hat M R^{-1/4}$. The length of each
    parameter's step is that of the step S of a simpler method, "grafted" onto P, because the length of P varies with
    the roots. The paper's algorithm is `accumulate=True, grafting=None, betas=(0.0, 0.0)`.

    Dimensions of size 1 are dropped. Dimensions behind the first are merged, from the last on, while their product is
    at most `max_preconditioner_size`: a convolution's weight (C, D, 3, 3) is a matrix (C, 9 D). A larger dimension has
    a diagonal $L_i$. The state has $2 \sum_i n_i^2$ numbers for dimensions $n_i$, and one or two for each element.

    Args:
        params: Parameters, or groups of them with separate settings, as for `torch.optim.Adam`; real and
            floating-point.
        lr: Learning rate $\gamma$, a number or a tensor with one number.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$, decoupled.
        accumulate: Whether $L_i$ is the sum of all $G_{(i)} G_{(i)}^\top$ instead of their average.
        grafting: Method of the step S: "adam", "adagrad", or "sgd" ($\hat M$); None for $S = P$.
        refresh_every: Number of steps between new roots; early roots are computed after 1, 2, 4, 8 ... steps, too.
        max_preconditioner_size: Largest n of a matrix (n, n).
        merge_dims: Whether to merge dimensions.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

    Example:
        >>> import torch, hodiff
        >>> w = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
        >>> optimizer = hodiff.optim.Shampoo([w], lr=0.1, grafting=None, eps=0.0)
        >>> (w**2).sum().backward()
        >>> optimizer.step()
        >>> w.detach()  # both singular values fell alike
        tensor([[2.9000, 0.0000],
                [0.0000, 0.4000]])

    Source: V. Gupta, T. Koren & Y. Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018,
    algorithms 1 and 2; R. Anil et al., "Scalable second order optimization for deep learning", 2020 (damping relative
    to the largest eigenvalue, rare refreshes); N. Agarwal et al., "Disentangling adaptive gradient methods from
    learning rates", 2020 (grafting).
    """

    whole_state = frozenset({"step", "exp_avg", "moments"})
    all_moments = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        accumulate: bool = False,
        grafting: str | None = "adam",
        refresh_every: int = 10,
        max_preconditioner_size: int = 2048,
        merge_dims: bool = True,
        maximize: bool = False,
    ):
        super().__init__(params, settings_in(locals()))

    def _least(self, group: Group) -> float:
        return LEAST if group["grafting"] in WITH_SQUARES else 0.0

    def _directions(self, states: Sequence[State], group: Group, gradients: Tensor) -> Tensor:
        (beta1, beta2), grafting = group["betas"], group["grafting"]
        if not states[0]:
            self._begin(states, group, gradients)
        step = states[0]["step"] + 1
        for state in states:
            state["step"] = step
            if grafting in WITH_SQUARES and "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        means = self._joined(states, "exp_avg").lerp_(gradients, 1 - beta1) / (1 - beta1**step)
        self._average(states, gradients, 1.0 if group["accumulate"] else beta2)
        grafted = means
        if grafting in WITH_SQUARES:
            squares = self._joined(states, "exp_avg_sq")
            grafted = means / WITH_SQUARES[grafting](squares, beta2, step, gradients)
        self._refresh(states, group)
        directions = multiplied(means, self._roots(states))
        if grafting is None:
            return directions
        sizes = sizes_of(directions).clamp_min_(torch.finfo(directions.dtype).tiny)
        return directions * (sizes_of(grafted) / sizes)

    def _roots(self, states: Sequence[State]) -> Sequence[Tensor | None]:
        if all("roots" in state for state in states):
            return self._factors(states, "roots")
        # Moments without roots are zero, and so is the step.
        each = (state.get("roots", state["moments"]) for state in states)
        return list(map(stacked, zip(*each, strict=True)))

    def _refresh(self, states: Sequence[State], group: Group) -> None:
        """Compute new roots if they are due or missing, but not before a nonzero gradient."""
        step = states[0]["step"]
        if not is_due(step, group["refresh_every"]):
            states = [state for state in states if "roots" not in state]
        if not states:
            return
        moments = list(map(stacked, zip(*(state["moments"] for state in states), strict=True)))
        # Read all answers at once.
        nonzero = torch.stack([each.flatten(1).any(1) for each in moments]).all(0)
        finite = torch.stack([each.isfinite().all() for each in moments]).all()
        *chosen, all_finite = torch.cat([nonzero, finite[None]]).tolist()
        self._require_finite(all_finite)
        if not all(chosen):
            states = [state for state, each in zip(states, chosen, strict=True) if each]
            moments = [each[nonzero] for each in moments]
        if not states:
            return
        debias = 1.0 if group["accumulate"] else 1 - group["betas"][1] ** step
        roots = [inverse_root(each / debias, 0.5 / len(moments), group["eps"]) for each in moments]
        for state, each in zip(states, zip(*(stack.unbind() for stack in roots), strict=True), strict=True):
            state["roots"] = list(each)
