"""Optimizers that divide by a history of squared gradients, without bias correction: RMSprop, Adagrad, Adadelta."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hodiff.meta.optimizer import Optimizer, Setting, Slots, add_quotient, add_scaled, is_active, mixed, root


@dataclass(frozen=True, eq=False)
class RMSprop(Optimizer):
    r"""RMSprop.

    $$ v_t = \alpha v_{t-1} + (1 - \alpha) g_t^2, \qquad
       \theta_t = \theta_{t-1} - \gamma \frac{g_t}{\sqrt{v_t} + \epsilon} $$

    With `centered`, the square of the average gradient is subtracted from $v_t$. With momentum, the quotient first
    enters $b_t = \mu b_{t-1} + g_t / (\sqrt{v_t} + \epsilon)$. The derivative of $\sqrt v$ is zero at $v = 0$.

    Args:
        lr: Learning rate $\gamma$.
        alpha: $\alpha$.
        eps: $\epsilon$.
        weight_decay: $\lambda$; $\lambda \theta$ is added to the gradient.
        momentum: $\mu$.
        centered: Whether to divide by the standard deviation.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> rmsprop = RMSprop(lr=0.01)
        >>> w = torch.tensor([1.0, 2.0])
        >>> rmsprop.update(w, rmsprop.init(w), w)[0]
        tensor([0.9000, 1.9000])

    Source: T. Tieleman & G. Hinton, "Lecture 6.5: RMSprop", Coursera, 2012; centered: A. Graves, "Generating sequences
    with recurrent neural networks", 2013, eq. 38-45; in the form of `torch.optim.RMSprop`.
    """

    lr: Setting = 1e-2
    alpha: Setting = 0.99
    eps: Setting = 1e-8
    weight_decay: Setting = 0.0
    momentum: Setting = 0.0
    centered: bool = False
    maximize: bool = field(default=False, kw_only=True)

    def slots(self, param: Tensor) -> Slots:
        """Return zeros for the second moment and, if used, for momentum and the mean gradient."""
        names = ["square_avg"] + ["momentum_buffer"] * is_active(self.momentum) + ["grad_avg"] * self.centered
        return {name: torch.zeros_like(param) for name in names}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        del step
        grad = self.decayed(grad, param)
        variance = mixed(slots["square_avg"], grad * grad, self.alpha)
        new = {"square_avg": variance}
        if self.centered:
            mean = new["grad_avg"] = mixed(slots["grad_avg"], grad, self.alpha)
            variance = variance - mean * mean
        scale = root(variance) + self.eps
        if not is_active(self.momentum):
            return add_quotient(param, -self.lr, grad, scale), new
        new["momentum_buffer"] = slots["momentum_buffer"] * self.momentum + grad / scale
        return add_scaled(param, -self.lr, new["momentum_buffer"]), new


@dataclass(frozen=True, eq=False)
class Adagrad(Optimizer):
    r"""Adagrad.

    $$ s_t = s_{t-1} + g_t^2, \qquad
       \theta_t = \theta_{t-1} - \frac{\gamma}{1 + (t - 1)\, \eta} \frac{g_t}{\sqrt{s_t} + \epsilon} $$

    The derivative of $\sqrt s$ is zero at $s = 0$.

    Args:
        lr: Learning rate $\gamma$.
        lr_decay: $\eta$.
        weight_decay: $\lambda$; $\lambda \theta$ is added to the gradient.
        initial_accumulator_value: $s_0$.
        eps: $\epsilon$.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> adagrad = Adagrad(lr=0.1)
        >>> w = torch.tensor([1.0, 2.0])
        >>> adagrad.update(w, adagrad.init(w), w)[0]
        tensor([0.9000, 1.9000])

    Source: J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", 2011, figure 1, in the form of `torch.optim.Adagrad`.
    """

    lr: Setting = 1e-2
    lr_decay: Setting = 0.0
    weight_decay: Setting = 0.0
    initial_accumulator_value: Setting = 0.0
    eps: Setting = 1e-10
    maximize: bool = field(default=False, kw_only=True)

    def slots(self, param: Tensor) -> Slots:
        """Return the initial sum of squared gradients."""
        return {"sum": torch.zeros_like(param) + self.initial_accumulator_value}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        grad = self.decayed(grad, param)
        total = slots["sum"] + grad * grad
        rate = self.lr / (1 + (step - 1) * self.lr_decay)
        return add_quotient(param, -rate, grad, root(total) + self.eps), {"sum": total}


@dataclass(frozen=True, eq=False)
class Adadelta(Optimizer):
    r"""Adadelta.

    $$ v_t = \rho v_{t-1} + (1 - \rho) g_t^2, \quad
       \Delta_t = \frac{\sqrt{u_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}}\, g_t, \quad
       u_t = \rho u_{t-1} + (1 - \rho) \Delta_t^2, \quad \theta_t = \theta_{t-1} - \gamma \Delta_t $$

    Args:
        lr: Learning rate $\gamma$.
        rho: $\rho$.
        eps: $\epsilon$.
        weight_decay: $\lambda$; $\lambda \theta$ is added to the gradient.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> adadelta = Adadelta()
        >>> w = torch.tensor([1.0, 2.0])
        >>> adadelta.update(w, adadelta.init(w), w)[0]
        tensor([0.9968, 1.9968])

    Source: M. D. Zeiler, "ADADELTA: an adaptive learning rate method", 2012, algorithm 1.
    """

    lr: Setting = 1.0
    rho: Setting = 0.9
    eps: Setting = 1e-6
    weight_decay: Setting = 0.0
    maximize: bool = field(default=False, kw_only=True)

    def slots(self, param: Tensor) -> Slots:
        """Return zeros for the second moments of gradients and steps."""
        return {name: torch.zeros_like(param) for name in ("square_avg", "acc_delta")}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        del step
        grad = self.decayed(grad, param)
        square = mixed(slots["square_avg"], grad * grad, self.rho)
        delta = root(slots["acc_delta"] + self.eps) / root(square + self.eps) * grad
        new = {"square_avg": square, "acc_delta": mixed(slots["acc_delta"], delta * delta, self.rho)}
        return add_scaled(param, -self.lr, delta), new
