"""Adam and related optimizers, in the form of `torch.optim`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hodiff.meta.optimizer import Optimizer, Setting, Slots, add_quotient, mixed, root


@dataclass(frozen=True, eq=False)
class Adam(Optimizer):
    r"""Adam.

    $$ m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
       \theta_t = \theta_{t-1} - \frac{\gamma}{1 - \beta_1^t}
       \frac{m_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} $$

    The derivative of $\sqrt v$ is defined as zero at $v = 0$, where all gradients so far were zero. The derivative of
    the step with respect to such a gradient is then exactly $-\gamma (1 - \beta_1) / ((1 - \beta_1^t)\, \epsilon)$.
    Settings may be tensors with gradients, and pytrees with the structure of the parameters.

    Args:
        lr: Learning rate $\gamma$.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$; $\lambda \theta$ is added to the gradient.
        amsgrad: Whether to divide by the largest $v$ so far.
        maximize: Whether to ascend.
        decoupled_weight_decay: Whether to shrink the parameters by $1 - \gamma\lambda$ instead: `AdamW`.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> adam = Adam(lr=0.1)
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> new, state = adam.update(w**2, adam.init(w), w)
        >>> new
        tensor([0.9000, 1.9000], grad_fn=...)

    Source: D. P. Kingma & J. Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1; AMSGrad: S. J. Reddi,
    S. Kale, S. Kumar, "On the convergence of Adam and beyond", 2018, algorithm 2.
    """

    lr: Setting = 1e-3
    betas: tuple[Setting, Setting] = (0.9, 0.999)
    eps: Setting = 1e-8
    weight_decay: Setting = 0.0
    amsgrad: bool = False
    maximize: bool = field(default=False, kw_only=True)
    decoupled_weight_decay: bool = field(default=False, kw_only=True)

    pairs: ClassVar[tuple[str, ...]] = ("betas",)

    def slots(self, param: Tensor) -> Slots:
        """Return zeros for both moments and, with AMSGrad, for the largest second moment."""
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * self.amsgrad
        return {name: torch.zeros_like(param) for name in names}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        beta1, beta2 = self.betas
        if self.decoupled_weight_decay:
            param = param * (1 - self.lr * self.weight_decay)
        else:
            grad = self.decayed(grad, param)
        slots = {
            "exp_avg": mixed(slots["exp_avg"], grad, beta1),
            "exp_avg_sq": mixed(slots["exp_avg_sq"], grad * grad, beta2),
        } | {name: slots[name] for name in slots if name.startswith("max")}
        second = slots["exp_avg_sq"]
        if self.amsgrad:
            second = slots["max_exp_avg_sq"] = torch.maximum(slots["max_exp_avg_sq"], second)
        scale = root(second) / (1 - beta2**step) ** 0.5 + self.eps
        return add_quotient(param, -self.lr / (1 - beta1**step), slots["exp_avg"], scale), slots


@dataclass(frozen=True, eq=False)
class AdamW(Adam):
    r"""Adam with decoupled weight decay: the parameters shrink by $1 - \gamma\lambda$ before each step of `Adam`.

    Args:
        lr: Learning rate $\gamma$.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$.
        amsgrad: Whether to divide by the largest second moment so far.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> adamw = AdamW(lr=0.1, weight_decay=0.5)
        >>> w = torch.tensor([1.0, 2.0])
        >>> adamw.update(torch.zeros(2), adamw.init(w), w)[0]
        tensor([0.9500, 1.9000])

    Source: I. Loshchilov & F. Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
    """

    weight_decay: Setting = 1e-2
    decoupled_weight_decay: bool = field(default=True, init=False)


@dataclass(frozen=True, eq=False)
class NAdam(Optimizer):
    r"""Adam with Nesterov momentum.

    $$ \mu_t = \beta_1 (1 - \tfrac12\, 0.96^{t \psi}), \quad M_t = \textstyle\prod_{i \le t} \mu_i, \quad
       \theta_t = \theta_{t-1} - \gamma\, \frac{\mu_{t+1} m_t / (1 - M_{t+1}) + (1 - \mu_t) g_t / (1 - M_t)}
       {\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} $$

    with the moments and the convention at $v = 0$ of `Adam`. As in torch, $M_t$ has the default dtype.

    Args:
        lr: Learning rate $\gamma$.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$.
        momentum_decay: $\psi$.
        decoupled_weight_decay: Whether to shrink the parameters instead of adding $\lambda \theta$ to the gradient.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> nadam = NAdam(lr=0.1)
        >>> w = torch.tensor([1.0, 2.0])
        >>> nadam.update(w, nadam.init(w), w)[0]
        tensor([0.8944, 1.8944])

    Source: T. Dozat, "Incorporating Nesterov momentum into Adam", 2016, algorithm 2.
    """

    lr: Setting = 2e-3
    betas: tuple[Setting, Setting] = (0.9, 0.999)
    eps: Setting = 1e-8
    weight_decay: Setting = 0.0
    momentum_decay: Setting = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = field(default=False, kw_only=True)

    pairs: ClassVar[tuple[str, ...]] = ("betas",)

    def slots(self, param: Tensor) -> Slots:
        """Return zeros for both moments, and 1 for the product of momenta."""
        product = torch.ones((), dtype=torch.get_default_dtype(), device=param.device)
        return {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param), "mu_product": product}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        beta1, beta2 = self.betas
        if self.decoupled_weight_decay:
            param = param * (1 - self.lr * self.weight_decay)
        else:
            grad = self.decayed(grad, param)
        now, after = (beta1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay)) for t in (step, step + 1))
        slots = {
            "exp_avg": mixed(slots["exp_avg"], grad, beta1),
            "exp_avg_sq": mixed(slots["exp_avg_sq"], grad * grad, beta2),
            "mu_product": slots["mu_product"] * now,
        }
        product = slots["mu_product"].double()
        scale = root(slots["exp_avg_sq"] / (1 - beta2**step)) + self.eps
        of_gradient = -self.lr * (1 - now) / (1 - product)
        of_average = -self.lr * after / (1 - product * after)
        return param + (of_gradient * grad + of_average * slots["exp_avg"]) / scale, slots


@dataclass(frozen=True, eq=False)
class Adamax(Optimizer):
    r"""Adam with the largest gradient instead of the second moment.

    $$ u_t = \max(\beta_2 u_{t-1}, |g_t| + \epsilon), \qquad
       \theta_t = \theta_{t-1} - \frac{\gamma}{1 - \beta_1^t} \frac{m_t}{u_t} $$

    The derivative of $|g|$ is zero at $g = 0$; if both arguments of the maximum are equal, each has half of it.

    Args:
        lr: Learning rate $\gamma$.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$; $\lambda \theta$ is added to the gradient.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> adamax = Adamax(lr=0.1)
        >>> w = torch.tensor([1.0, 2.0])
        >>> adamax.update(w, adamax.init(w), w)[0]
        tensor([0.9000, 1.9000])

    Source: D. P. Kingma & J. Ba, "Adam: a method for stochastic optimization", 2015, algorithm 2.
    """

    lr: Setting = 2e-3
    betas: tuple[Setting, Setting] = (0.9, 0.999)
    eps: Setting = 1e-8
    weight_decay: Setting = 0.0
    maximize: bool = field(default=False, kw_only=True)

    pairs: ClassVar[tuple[str, ...]] = ("betas",)

    def slots(self, param: Tensor) -> Slots:
        """Return zeros for the first moment and the largest gradient."""
        return {name: torch.zeros_like(param) for name in ("exp_avg", "exp_inf")}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Take one step."""
        beta1, beta2 = self.betas
        grad = self.decayed(grad, param)
        average = mixed(slots["exp_avg"], grad, beta1)
        largest = torch.maximum(slots["exp_inf"] * beta2, grad.abs() + self.eps)
        param = add_quotient(param, -self.lr / (1 - beta1**step), average, largest)
        return param, {"exp_avg": average, "exp_inf": largest}
