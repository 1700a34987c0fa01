"""Cost of a step of `PINNKFAC` on a physics-informed loss, in steps of AdamW on the same loss."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hodiff
from benchmarks.race import Contestant, median_ratio, race

ADAMW, OURS = "`torch.optim.AdamW`", "`PINNKFAC`"
WIDTHS = (64, 256)


def problem(width: int) -> tuple[nn.Module, Any]:
    """Return a network, and the terms of Poisson's equation: 256 points inside, 64 on the boundary."""
    torch.manual_seed(0)
    layers = [each for a, b in itertools.pairwise((2, *[width] * 3, 1)) for each in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])

    def u(x: Tensor) -> Tensor:
        return model(x)[0]

    def equation(x: Tensor) -> Tensor:
        return hodiff.laplacian(u)(x) + x.sin().sum()

    edge = torch.rand(64, 2)
    edge[:, 0].round_()
    return model, ((equation, torch.rand(256, 2)), (u, edge))


def natural(width: int) -> tuple[Callable[[], Any], hodiff.optim.PINNKFAC]:
    """Return a step of `PINNKFAC`, and the optimizer."""
    model, terms = problem(width)
    optimizer = hodiff.optim.PINNKFAC(model)
    return lambda: optimizer.step(*terms), optimizer


def first_order(width: int) -> Callable[[], Any]:
    """Return a step of AdamW."""
    model, terms = problem(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        sum((torch.func.vmap(f)(points).square().mean() / 2 for f, points in terms), torch.zeros(())).backward()
        optimizer.step()

    return step


def measured_residuals(width: int, rounds: int) -> tuple[float, torch.optim.Optimizer]:
    """Measure the ratio of a step of `PINNKFAC` to AdamW's; also return the optimizer."""
    step, optimizer = natural(width)
    contestants = [Contestant(ADAMW, "torch", first_order(width)), Contestant(OURS, "hodiff", step)]
    seconds = race(contestants, rounds, f"width {width}", time.process_time)
    return median_ratio(seconds[OURS], seconds[ADAMW]), optimizer
