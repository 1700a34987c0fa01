"""Lion, an optimizer with steps of signs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hodiff.meta.optimizer import Optimizer, Setting, Slots, add_scaled, mixed


@dataclass(frozen=True, eq=False)
class Lion(Optimizer):
    r"""Lion.

    $$ c_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
       \theta_t = \theta_{t-1} - \gamma\, (\operatorname{sign} c_t + \lambda \theta_{t-1}), \quad
       m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t $$

    The derivative of the sign is zero wherever it exists. Derivatives therefore reach the learning rate, the weight
    decay and the parameters before the step, but never the gradients or the betas.

    Args:
        lr: Learning rate $\gamma$.
        betas: $\beta_1$ and $\beta_2$.
        weight_decay: $\lambda$, decoupled.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> lion = Lion(lr=0.1)
        >>> w = torch.tensor([1.0, -2.0])
        >>> lion.update(w, lion.init(w), w)[0]
        tensor([ 0.9000, -1.9000])

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
    """

    lr: Setting = 1e-4
    betas: tuple[Setting, Setting] = (0.9, 0.99)
    weight_decay: Setting = 0.0
    maximize: bool = field(default=False, kw_only=True)

    pairs: ClassVar[tuple[str, ...]] = ("betas",)

    def slots(self, param: Tensor) -> Slots:
        """Return zeros for the momentum."""
        return {"exp_avg": torch.zeros_like(param)}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        del step
        beta1, beta2 = self.betas
        direction = self.decayed(torch.sign(mixed(slots["exp_avg"], grad, beta1)), param)
        return add_scaled(param, -self.lr, direction), {"exp_avg": mixed(slots["exp_avg"], grad, beta2)}
