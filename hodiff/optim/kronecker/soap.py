"""SOAP: Adam in the eigenvectors of Shampoo's matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.optim.kronecker.kronecker_optimizer import (
    KroneckerOptimizer,
    State,
    along,
    eigenvectors,
    multiplied,
    sizes_of,
    turned,
)
from hodiff.optim.settings import settings_in
from hodiff.optim.training_optimizer import Group

# Multiple of the rounding error below which a coordinate is zero.
ROUNDINGS = 4


class SOAP(KroneckerOptimizer):
    r"""Adam in a basis that slowly rotates to the eigenvectors of the gradients' second moments.

    For a matrix, with $Q_L$ and $Q_R$ approximately the eigenvectors of L and R,

    $$ M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad
       V \leftarrow \beta_2 V + (1 - \beta_2)\, (Q_L^\top G\, Q_R)^{\circ 2}, \qquad
       \theta \leftarrow (1 - \gamma \lambda)\, \theta -
       \gamma\, Q_L \frac{Q_L^\top \hat M Q_R}{\sqrt{\hat V} + \epsilon} Q_R^\top $$

    $$ L \leftarrow \beta_2 L + (1 - \beta_2)\, G G^\top, \qquad R \leftarrow \beta_2 R + (1 - \beta_2)\, G^\top G,
       \qquad \text{every k steps: } Q_L \leftarrow \mathrm{qr}(L\, Q_L), \; Q_R \leftarrow \mathrm{qr}(R\, Q_R) $$

    where columns of Q, and V with them, are first sorted by the diagonal of $Q^\top L\, Q$; and likewise for more
    dimensions. The first step computes the eigenvectors of the first gradient and leaves the parameters unchanged: in
    its own basis a gradient has zeros up to rounding, which Adam would turn into steps of full length. Gradients of
    exactly low rank leave some eigenvectors undetermined. Rounding then chooses them, so two machines may take
    different paths of equal quality.

    Dimensions of size 1 are dropped. Dimensions behind the first are merged, from the last on, while their product is
    at most `max_preconditioner_size`: a convolution's weight (C, D, 3, 3) is a matrix (C, 9 D). A larger dimension
    keeps its standard basis, and so do vectors, for which SOAP is Adam. The state has $2 \sum_i n_i^2$ numbers for
    dimensions $n_i$, and two for each element.

    Args:
        params: Parameters, or groups of them with separate settings, as for `torch.optim.Adam`; real and
            floating-point.
        lr: Learning rate $\gamma$, a number or a tensor with one number.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$, decoupled.
        refresh_every: k.
        max_preconditioner_size: Largest n of a matrix (n, n).
        merge_dims: Whether to merge dimensions.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

    Example:
        >>> import torch, hodiff
        >>> inputs, targets = torch.randn(20, 3), torch.randn(20, 2)
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = hodiff.optim.SOAP(model.parameters(), lr=0.05)
        >>> closure = lambda: torch.nn.functional.mse_loss(model(inputs), targets)
        >>> losses = [optimizer.step(closure).item() for _ in range(10)]
        >>> losses[-1] < losses[1] == losses[0]  # the first step only makes the basis
        True

    Source: N. Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", ICLR 2025, algorithms 3 and 4.
    """

    whole_state = frozenset({"step", "exp_avg", "exp_avg_sq", "moments", "bases"})
    all_moments = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        refresh_every: int = 10,
        max_preconditioner_size: int = 2048,
        merge_dims: bool = True,
        maximize: bool = False,
    ):
        super().__init__(params, settings_in(locals()))

    def _least(self, group: Group) -> float:
        return float(group["eps"])

    def _directions(self, states: Sequence[State], group: Group, gradients: Tensor) -> Tensor | None:
        beta1, beta2 = group["betas"]
        if not states[0]:
            self._begin(states, group, gradients)
            return None
        step = states[0]["step"] + 1
        for state in states:
            state["step"] = step
        projected = self._projected(states, gradients)
        # Averaging in the basis, as the paper's M' does, saves a product; the average is rotated with the basis.
        means = self._joined(states, "exp_avg").lerp_(projected, 1 - beta1) / (1 - beta1**step)
        scales = self._scales(states, projected, beta2)
        # If a coordinate has no gradient, a change of basis leaves rounding errors there, which must not make steps.
        rounding = ROUNDINGS * torch.finfo(scales.dtype).eps * sizes_of(scales)
        steps = (means / (scales + group["eps"])).masked_fill_(scales <= rounding, 0.0)
        directions = multiplied(steps, self._factors(states, "bases"))
        self._update_moments(states, gradients, projected, beta2)
        if step % group["refresh_every"] == 0:
            self._turn(states)
        return directions

    def _projected(self, states: Sequence[State], gradients: Tensor) -> Tensor:
        return multiplied(gradients, self._factors(states, "bases"), transposed=True)

    def _scales(self, states: Sequence[State], projected: Tensor, keep: float) -> Tensor:
        """Return what the means are divided by, apart from epsilon, after an update by the gradient."""
        squares = self._joined(states, "exp_avg_sq").mul_(keep).addcmul_(projected, projected, value=1 - keep)
        return (squares / (1 - keep ** states[0]["step"])).sqrt_()

    def _update_moments(self, states: Sequence[State], gradients: Tensor, projected: Tensor, keep: float) -> None:
        self._average(states, gradients, keep)

    def _begin(self, states: Sequence[State], group: Group, gradients: Tensor) -> None:
        super()._begin(states, group, gradients)
        if "exp_avg_sq" in self.whole_state:
            for state in states:
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        self._average(states, gradients, group["betas"][1])
        bases = [None if each is None else eigenvectors(each) for each in self._finite_moments(states)]
        for i, state in enumerate(states):
            state["bases"] = [None if each is None else each[i] for each in bases]

    def _turn(self, states: Sequence[State]) -> None:
        averages, bases = self._joined(states, "exp_avg"), self._factors(states, "bases")
        means = multiplied(averages, bases)
        for dim, (moments, basis) in enumerate(zip(self._finite_moments(states), bases, strict=True)):
            if moments is not None and basis is not None:
                order, new = turned(moments, basis)
                basis.copy_(new)
                self._reorder(states, dim, order)
        averages.copy_(multiplied(means, bases, transposed=True))

    def _reorder(self, states: Sequence[State], dim: int, order: Tensor) -> None:
        """Reorder what belongs to the columns of a basis."""
        if "exp_avg_sq" in self.whole_state:
            squares = self._joined(states, "exp_avg_sq")
            squares.copy_(squares.take_along_dim(along(order, dim, squares), dim + 1))

    def _finite_moments(self, states: Sequence[State]) -> list[Tensor | None]:
        moments = self._factors(states, self.moments_name)
        finite = [each.isfinite().all() for each in moments if each is not None]
        self._require_finite(not finite or bool(torch.stack(finite).all()))
        return moments
