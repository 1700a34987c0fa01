"""Stochastic gradient descent, in the form of `torch.optim.SGD`, and Lion, which takes steps of signs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.meta.optimizer import Optimizer, Setting, Slots, add_scaled, is_active, mixed


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


@dataclass(frozen=True, eq=False)
class SGD(Optimizer):
    r"""Gradient descent with momentum.

    $$ b_t = \mu\, b_{t-1} + (1 - \tau)\, g_t, \qquad \theta_t = \theta_{t-1} - \gamma\, b_t
       \quad \text{(Nesterov: } g_t + \mu\, b_t \text{ in place of } b_t\text{)} $$

    with $b_1 = g_1$. Settings may be tensors with gradients, and pytrees with the structure of the parameters.

    Args:
        lr: Learning rate $\gamma$.
        momentum: $\mu$.
        dampening: $\tau$.
        weight_decay: $\lambda$; $\lambda \theta$ is added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or `nesterov` is used without momentum or with dampening.

    Example:
        >>> import torch
        >>> lr = torch.tensor(0.1, requires_grad=True)
        >>> sgd = SGD(lr)
        >>> w = torch.tensor([1.0, 2.0])
        >>> w, state = sgd.update(2 * w, sgd.init(w), w)
        >>> torch.autograd.grad(w.sum(), lr)[0]
        tensor(-6.)

    Source: I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in deep
    learning", 2013, section 2, in the form of `torch.optim.SGD`.
    """

    lr: Setting = 1e-3
    momentum: Setting = 0.0
    dampening: Setting = 0.0
    weight_decay: Setting = 0.0
    nesterov: bool = False
    maximize: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (not _may_be_active(self.momentum) or _may_be_active(self.dampening)):
            raise InputError(
                f"SGD: nesterov: expected momentum above 0 and no dampening, got momentum={self.momentum!r} and "
                f"dampening={self.dampening!r}."
            )

    def slots(self, param: Tensor) -> Slots:
        """Return zeros for the momentum buffer, if there is momentum."""
        return {"momentum_buffer": torch.zeros_like(param)} if is_active(self.momentum) else {}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        direction = grad = self.decayed(grad, param)
        if is_active(self.momentum):
            if step > 1:
                direction = add_scaled(slots["momentum_buffer"] * self.momentum, 1 - self.dampening, grad)
            slots = {"momentum_buffer": direction}
            if self.nesterov:
                direction = add_scaled(grad, self.momentum, direction)
        return add_scaled(param, -self.lr, direction), slots


def _may_be_active(setting: Setting) -> bool:
    return not isinstance(setting, (int, float)) or setting != 0
