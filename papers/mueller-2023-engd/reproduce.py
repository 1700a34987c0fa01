"""Errors of small physics-informed networks, trained by energy natural gradients, BFGS and Adam.

python papers/mueller-2023-engd/reproduce.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

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
STARTS, ITERATIONS = 1, {POISSON: 250, HEAT: 400}
LEAST_DAMPING, QUICK_CUTOFF = 1e-14, 1e-6
ADAM_RATE = 1e-3


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


class Course:
    """Losses and relative errors by processor seconds and iterations; the clock stops while they are recorded."""

    def __init__(self, informed: Informed, most: float):
        self.informed, self.most, self.used, self.iteration, self.next = informed, most, 0.0, 0, 1
        self.rows: list[tuple[int, float, float, float]] = []
        self.start = time.process_time()

    def note(self) -> bool:
        """Count an iteration, and record some of them; return whether time is left."""
        self.used += time.process_time() - self.start
        self.iteration += 1
        left = self.used < self.most
        if self.iteration >= self.next or not left:
            with torch.no_grad():
                self.rows.append((self.iteration, self.used, self.informed.loss().item(), self.informed.error()))
            self.next = max(self.iteration + 1, int(1.05 * self.iteration))
        self.start = time.process_time()
        return left

    def least(self) -> float:
        """Return the least error."""
        return min(error for *_, error in self.rows)


def by_engd(informed: Informed, course: Course, iterations: int, cutoff: float | None) -> None:
    """Take steps by the pseudo-inverse; add damping only while no step of the line search lowers the loss."""
    count = sum(p.numel() for p in informed.model.parameters())
    # The paper's code calls JAX's lstsq, whose cutoff this is.
    cutoff = count * torch.finfo(torch.float64).eps if cutoff is None else cutoff
    optimizer = hodiff.optim.ENGD(informed.model, damping=0.0, rcond=cutoff)
    group, terms, before = optimizer.param_groups[0], informed.terms(), math.inf
    while course.iteration < iterations:
        loss = optimizer.step(*terms).item()
        # The paper's code then takes the shortest step of the grid, which raises the loss.
        group["damping"] = max(10 * group["damping"], LEAST_DAMPING) if loss >= before else 0.0
        before = loss
        course.note()


def by_bfgs(informed: Informed, course: Course) -> None:
    """Minimise the loss by SciPy's BFGS until the time is over."""

    def watch(result: Any) -> None:
        for parameter, found in zip(informed.model.parameters(), result.x.values(), strict=True):
            parameter.data = found.clone()
        if not course.note():
            raise StopIteration

    start = {name: parameter.detach().clone() for name, parameter in informed.model.named_parameters()}
    options = {"maxiter": 10**6, "gtol": 0.0}
    hodiff.optimize.minimize(informed.loss, start, method="bfgs", options=options, callback=watch)


def by_adam(informed: Informed, course: Course) -> None:
    """Take steps of Adam until the time is over, with a rate that decays tenfold in the second half."""
    optimizer, left = torch.optim.Adam(informed.model.parameters(), lr=ADAM_RATE), True
    while left:
        optimizer.param_groups[0]["lr"] = ADAM_RATE * 10 ** -max(0.0, 2 * course.used / course.most - 1)
        optimizer.zero_grad()
        torch.autograd.backward(informed.loss())
        optimizer.step()
        left = course.note()


def solve(
    name: str, seed: int, iterations: int, size: dict[str, int], cutoff: float | None = None
) -> dict[str, Course]:
    """Train by ENGD for some iterations, and by the other methods for as much time."""
    informed = Informed(name, seed, **size)
    found = {ENGD: Course(informed, math.inf)}
    by_engd(informed, found[ENGD], iterations, cutoff)
    for method, train in ((BFGS, by_bfgs), (ADAM, by_adam)):
        informed = Informed(name, seed, **size)
        found[method] = Course(informed, found[ENGD].used)
        train(informed, found[method])
    return found


def draw(runs: dict[str, list[dict[str, Course]]]) -> Figure:
    """Plot errors by seconds, one panel per problem."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, (name, starts) in zip(figure.subplots(1, len(runs)), runs.items(), strict=True):
        for k, method in enumerate((ENGD, BFGS, ADAM)):
            for seed, found in enumerate(starts):
                _, seconds, _, errors = zip(*found[method].rows, strict=True)
                axes.loglog(seconds, errors, f"C{k}", label=method if seed == 0 else None, linewidth=1)
        axes.set(title=name, xlabel="processor seconds", ylabel="relative error")
    figure.axes[0].legend(fontsize=8)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Train both networks by all methods from the same weights."""
    torch.set_num_threads(1)
    starts, size = (1, {"width": 8, "count": 8}) if quick else (STARTS, {})
    iterations = dict.fromkeys(PROBLEMS, 20) if quick else ITERATIONS
    # Few steps do not leave the plateau of the paper's cutoff.
    cutoff = QUICK_CUTOFF if quick else None
    # Work that is done on first use counts for no method.
    for name in PROBLEMS:
        solve(name, 0, 2, {"width": 4, "count": 5})
    tasks = [(name, seed) for name in PROBLEMS for seed in range(starts)]
    runs: dict[str, list[dict[str, Course]]] = {name: [] for name in PROBLEMS}
    for name, seed in tqdm(tasks, desc="training", leave=False, disable=not progress):
        runs[name].append(solve(name, seed, iterations[name], size, cutoff))
    least = {n: {m: [found[m].least() for found in own] for m in (ENGD, BFGS, ADAM)} for n, own in runs.items()}
    middle = {name: {method: median(errors) for method, errors in own.items()} for name, own in least.items()}
    ratios = {name: [own[method] / own[ENGD] for method in (BFGS, ADAM)] for name, own in middle.items()}
    claims = [
        *(
            Claim(
                f"ENGD finds highly accurate solutions: relative error, {name}",
                "1e-6 to 1e-8 (a summary of the paper); highly accurate (abstract)",
                f"{own[ENGD]:.1e} within {iterations[name]} iterations",
                verdict(own[ENGD] <= 1e-6, own[ENGD] <= 1e-5),
            )
            for name, own in middle.items()
        ),
        *(
            Claim(
                f"Errors of BFGS and Adam are several orders of magnitude larger, {name}",
                "several orders of magnitude (abstract); 1e-3 to 1e-4 (a summary)",
                f"BFGS {own[BFGS]:.1e}, Adam {own[ADAM]:.1e} in as much time: {ratios[name][0]:.2g} and "
                f"{ratios[name][1]:.2g} times ENGD's",
                verdict(min(ratios[name]) > 100, min(ratios[name]) > 10),
            )
            for name, own in middle.items()
        ),
        *(
            Claim(
                f"Iterations, and seconds: {name}",
                "",
                "; ".join(f"{m} {own[0][m].iteration:,}, {own[0][m].used:.0f} s" for m in (ENGD, BFGS, ADAM)),
                OURS,
            )
            for name, own in runs.items()
        ),
    ]
    settings = {"starts": starts, "iterations": iterations, "least damping": LEAST_DAMPING, **size}
    data = {
        "least errors": least,
        "rows": {name: [{m: course.rows for m, course in each.items()} for each in own] for name, own in runs.items()},
    }
    return Reproduction(claims, settings, data, draw(runs))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
