"""Optimizers that are compared, with their steps. Settings are the defaults but for rates and what the name says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.optim import (
    KFAC,
    KLSOAP,
    SOAP,
    AdaHessian,
    HessianFree,
    KLShampoo,
    LayerwiseGaussNewton,
    Muon,
    Shampoo,
    SophiaG,
    SophiaH,
)

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[nn.Module, Any, Loss, Tensor, Tensor], object]


def loop(model: nn.Module, optimizer: Any, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Take a step of an ordinary training loop."""
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()


def recomputed(model: nn.Module, optimizer: Any, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Take a step with a closure that recomputes the loss and its gradient."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        return value

    optimizer.step(closure)


def pair(model: nn.Module, optimizer: Any, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Take a step with a closure that returns the outputs and a loss of the outputs."""
    optimizer.step(lambda: (model(inputs), lambda outputs: loss(outputs, targets)))


@dataclass(frozen=True)
class Row:
    """Optimizer: its constructor from model and learning rate, its step, and whether it uses large batches."""

    make: Callable[[nn.Module, float], Any]
    step: Step = loop
    large: bool = False


OPTIMIZERS = {
    "`torch.optim.SGD`, momentum 0.9": Row(lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9)),
    "`torch.optim.Adam`": Row(lambda model, lr: torch.optim.Adam(model.parameters(), lr)),
    "`torch.optim.LBFGS`": Row(
        lambda model, lr: torch.optim.LBFGS(model.parameters(), lr, max_iter=1, line_search_fn="strong_wolfe"),
        recomputed,
        large=True,
    ),
    "`AdaHessian`": Row(lambda model, lr: AdaHessian(model.parameters(), lr)),
    "`SophiaH`": Row(lambda model, lr: SophiaH(model.parameters(), lr)),
    "`SophiaG`": Row(lambda model, lr: SophiaG(model.parameters(), lr)),
    "`Shampoo`": Row(lambda model, lr: Shampoo(model.parameters(), lr)),
    "`SOAP`": Row(lambda model, lr: SOAP(model.parameters(), lr)),
    "`KLShampoo`": Row(lambda model, lr: KLShampoo(model.parameters(), lr)),
    "`KLSOAP`": Row(lambda model, lr: KLSOAP(model.parameters(), lr)),
    "`Muon`": Row(lambda model, lr: Muon(model.parameters(), lr)),
    "`KFAC`": Row(lambda model, lr: KFAC(model.parameters(), lr)),
    # Chosen after short runs of these tasks.
    "`KFAC`, `kl_clip=3e-5`": Row(lambda model, lr: KFAC(model.parameters(), lr, kl_clip=3e-5)),
    "`LayerwiseGaussNewton`": Row(
        lambda model, lr: LayerwiseGaussNewton(model.named_parameters(), lr), pair, large=True
    ),
    "`HessianFree`": Row(lambda model, lr: HessianFree(model.parameters(), lr), pair, large=True),
}
