"""Errors of small physics-informed networks, trained by energy natural gradients, BFGS and Adam.

python papers/mueller-2023-engd/reproduce.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from papers.common import OURS, Claim, Reproduction, run, verdict

Function = Callable[[Tensor], Tensor]
ENGD, BFGS, ADAM = "ENGD", "BFGS", "Adam"
POISSON, HEAT = "Poisson, 2-D", "heat, 1 + 1-D"


def sines(points: Tensor) -> Tensor:
    """Compute sin(pi x) sin(pi y)."""
    return torch.sin(math.pi * points).prod(-1, keepdim=True)


def cooling(points: Tensor) -> Tensor:
    """Compute exp(-pi^2 t / 4) sin(pi x) at points (t, x), which solves u_t = u_xx / 4."""
    return torch.exp(-(math.pi**2) / 4 * points[..., :1]) * torch.sin(math.pi * points[..., 1:])


def poisson(u: Function, batched: bool) -> Function:
    """Return the residual of u_xx + u_yy = -2 pi^2 sin(pi x) sin(pi y)."""
    laplacian = hodiff.laplacian(u, batched=batched)
    return lambda points: laplacian(points) + 2 * math.pi**2 * sines(points)


def heat(u: Function, batched: bool) -> Function:
    """Return the residual of u_t = u_xx / 4."""
    partials = hodiff.partial(u, [(0,), (1, 1)], batched=batched)

    def residual(points: Tensor) -> Tensor:
        by_time, curvature = partials(points)
        return by_time - curvature / 4

    return residual


@dataclass(frozen=True)
class Problem:
    """An equation in the unit square with its solution; sides with values are pairs of a coordinate and its number."""

    solution: Function
    residual: Callable[[Function, bool], Function]
    width: int
    sides: tuple[tuple[int, float], ...]


PROBLEMS = {
    POISSON: Problem(sines, poisson, 32, ((0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0))),
    HEAT: Problem(cooling, heat, 64, ((0, 0.0), (1, 0.0), (1, 1.0))),
}


@dataclass
class Course:
    """Relative errors and losses by processor seconds and iterations."""

    seconds: list[float] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


class Informed:
    """A network with one hidden layer, its training points on a grid, and its error, for a problem."""

    def __init__(self, name: str, seed: int, width: int | None = None, count: int = 30):
        self.problem = PROBLEMS[name]
        width = width or self.problem.width
        self.model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10
        line = torch.linspace(0, 1, count, dtype=torch.float64)
        self.inside = torch.cartesian_prod(line[1:-1], line[1:-1])
        edges = [torch.stack([line, line], 1) for _ in self.problem.sides]
        for edge, (coordinate, number) in zip(edges, self.problem.sides, strict=True):
            edge[:, coordinate] = number
        self.edge = torch.cat(edges)
        finer = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
        self.tests = torch.cartesian_prod(finer, finer)
        self.expected = self.problem.solution(self.tests)

    def terms(self) -> tuple[tuple[Function, Tensor], tuple[Function, Tensor]]:
        """Return both residuals as functions of one point; means become integrals with the length of the sides."""
        length, solution = len(self.problem.sides), self.problem.solution
        return (
            (self.problem.residual(self.model, False), self.inside),
            (lambda x: math.sqrt(length) * (self.model(x) - solution(x)), self.edge),
        )

    def loss(self, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """Compute half the integrals of the squares of both residuals."""

        def u(points: Tensor) -> Tensor:
            found: Tensor = torch.func.functional_call(self.model, parameters or {}, (points,))
            return found

        edge = u(self.edge) - self.problem.solution(self.edge)
        inside = self.problem.residual(u, True)(self.inside)
        return (inside.square().mean() + len(self.problem.sides) * edge.square().mean()) / 2

    @torch.no_grad()
    def error(self) -> float:
        """Compute the relative error in the 2-norm, on the finer grid."""
        return float((self.model(self.tests) - self.expected).norm() / self.expected.norm())


def by_engd(informed: Informed, iterations: int, note: Callable[[int], None]) -> None:
    """Take steps of ENGD; the damping follows the loss, as it bounds the accuracy."""
    optimizer, terms = hodiff.optim.ENGD(informed.model, damping=1e-3), informed.terms()
    for iteration in range(iterations):
        loss = optimizer.step(*terms)
        optimizer.param_groups[0]["damping"] = min(max(1e-3 * loss.item(), SMALLEST_DAMPING), 1e-3)
        note(iteration + 1)
SMALLEST_DAMPING=1e-13
