"""Errors of physics-informed networks by seconds, trained by K-FAC, energy natural gradients, and other methods.

python papers/dangel-2024-pinn-kfac/reproduce.py
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from papers.common import OURS, Claim, Reproduction, run, span, verdict

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """An equation in a unit cube with its solution; a time is the first coordinate."""

    dims: int
    solution: Function
    source: Function
    diffusivity: float | None = None

    def residual(self, model: nn.Module, points: Tensor, batched: bool) -> Tensor:
        """Compute Laplacian plus source, or the time derivative minus the Laplacian in space."""
        if self.diffusivity is None:
            return hodiff.laplacian(model, batched=batched)(points) + self.source(points)
        wanted = [(0,), *((i, i) for i in range(1, self.dims))]
        slope, *curvatures = hodiff.partial(model, wanted, batched=batched)(points)
        return slope - self.diffusivity * torch.stack(curvatures).sum(0)

    def draw(self, inside: int, outside: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Draw points inside, and on the boundary; for a time at the start, and at the faces in space."""
        source = torch.Generator().manual_seed(seed)
        edge = torch.rand(outside, self.dims, generator=source, dtype=torch.float64)
        first = 0 if self.diffusivity is None else 1
        faces = torch.randint(first, self.dims, (outside,), generator=source)
        sides = torch.randint(2, (outside,), generator=source).double()
        if first:
            faces[: outside // 2], sides[: outside // 2] = 0, 0.0
        edge[torch.arange(outside), faces] = sides
        return torch.rand(inside, self.dims, generator=source, dtype=torch.float64), edge


def cosines(points: Tensor) -> Tensor:
    """Compute the sum of cos(pi x_i)."""
    return torch.cos(math.pi * points).sum(-1, keepdim=True)


def products(points: Tensor) -> Tensor:
    """Compute the harmonic function x_1 x_2 + x_3 x_4 + ..."""
    return (points[..., ::2] * points[..., 1::2]).sum(-1, keepdim=True)


def cooling(points: Tensor) -> Tensor:
    """Compute exp(-t) times the sum of cos(2 x_i), which cools at a diffusivity of 1 / 4."""
    return torch.exp(-points[..., :1]) * torch.cos(2 * points[..., 1:]).sum(-1, keepdim=True)


def nothing(points: Tensor) -> Tensor:
    """Return zeros."""
    return torch.zeros_like(points[..., :1])


PROBLEMS = {
    "Poisson, 5-D": Problem(5, cosines, lambda x: math.pi**2 * cosines(x)),
    "Poisson, 10-D": Problem(10, products, nothing),
    "heat, 4 + 1-D": Problem(5, cooling, nothing, 0.25),
}


class Informed:
    """A network, its training points, and its error, for a problem."""

    def __init__(self, name: str, width: int, inside: int):
        self.problem = PROBLEMS[name]
        torch.manual_seed(0)
        sizes = [self.problem.dims, width, width, 1]
        layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(sizes)]
        self.model = nn.Sequential(*itertools.chain(*layers)).double()[:-1]
        self.inside, self.edge = self.problem.draw(inside, inside // 2)
        self.tests, _ = self.problem.draw(2000, 1, seed=1)
        self.values, self.expected = self.problem.solution(self.edge), self.problem.solution(self.tests)

    def error(self) -> float:
        """Compute the relative error in the 2-norm at points inside."""
        with torch.no_grad():
            return float((self.model(self.tests) - self.expected).norm() / self.expected.norm())

    def loss(self) -> Tensor:
        """Compute half the mean squares of both residuals."""
        residual = self.problem.residual(self.model, self.inside, True)
        return residual.square().mean() / 2 + (self.model(self.edge) - self.values).square().mean() / 2

    def terms(self) -> tuple[tuple[Function, Tensor], tuple[Function, Tensor]]:
        """Return both residuals as functions of one point."""
        model, problem = self.model, self.problem
        return (
            (lambda x: problem.residual(model, x, False), self.inside),
            (lambda x: model(x) - problem.solution(x), self.edge),
        )


Step = Callable[[], Tensor]


def by_terms(make: Callable[[nn.Module], hodiff.optim.ENGD | hodiff.optim.PINNKFAC]) -> Callable[[Informed], Step]:
    """Train by a method for residuals at points."""

    def start(informed: Informed) -> Step:
        optimizer, terms = make(informed.model), informed.terms()
        return lambda: optimizer.step(*terms)

    return start


def by_closure(make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[Informed], Step]:
    """Train by a method for losses."""

    def start(informed: Informed) -> Step:
        optimizer = make(informed.model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = informed.loss()
            torch.autograd.backward(loss)
            return loss

        return lambda: torch.as_tensor(optimizer.step(closure))

    return start


KFAC, GRID, ENGD, BROYDEN, LBFGS, SOAP, ADAM = (
    *("K-FAC, quadratic model", "K-FAC, line search", "ENGD", "SSBroyden", "L-BFGS", "SOAP", "Adam"),
)
METHODS = {
    KFAC: by_terms(lambda model: hodiff.optim.PINNKFAC(model, damping=1e-2, factor_decay=0.3)),
    GRID: by_terms(lambda model: hodiff.optim.PINNKFAC(model, damping=0.1, momentum=0.9, line_search_fn="grid")),
    ENGD: by_terms(lambda model: hodiff.optim.ENGD(model, damping=1e-6)),
    BROYDEN: by_closure(lambda parameters: hodiff.optim.SSBroyden(parameters, max_iter=5)),
    LBFGS: by_closure(lambda parameters: hodiff.optim.LBFGS(parameters, max_iter=5, tolerance_change=0.0)),
    SOAP: by_closure(lambda parameters: hodiff.optim.SOAP(parameters, lr=3e-3)),
    ADAM: by_closure(lambda parameters: torch.optim.Adam(parameters, lr=3e-3)),
}
FIRST_ORDER = (SOAP, ADAM)


def train(informed: Informed, method: str, budget: float) -> dict[str, list[float]]:
    """Train for some processor seconds; return seconds, losses and errors after some of the steps."""
    step, used, next_note, count = METHODS[method](informed), 0.0, 0.0, 0
    found: dict[str, list[float]] = {"seconds": [0.0], "loss": [informed.loss().item()], "error": [informed.error()]}
    while used < budget:
        start = time.process_time()
        step()
        used, count = used + time.process_time() - start, count + 1
        if used >= next_note or used >= budget:
            for key, value in zip(found, (used, informed.loss().item(), informed.error()), strict=True):
                found[key].append(value)
            next_note = max(1.08 * used, 0.05)
    found["steps"] = [float(count)]
    return found


def until(curve: dict[str, list[float]], goal: float) -> float:
    """Return the seconds until the error reached a goal, or infinity."""
    return next((s for s, error in zip(curve["seconds"], curve["error"], strict=True) if error <= goal), math.inf)


def step_seconds(method: str, width: int, inside: int) -> float:
    """Return the mean processor seconds of the second and third step of a method for Poisson's equation in 5-D."""
    step = METHODS[method](Informed("Poisson, 5-D", width, inside))
    step()
    start = time.process_time()
    for _ in range(2):
        step()
    return (time.process_time() - start) / 2


def draw(runs: dict[str, dict[str, dict[str, list[float]]]]) -> Figure:
    """Plot errors by seconds, one panel per problem."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(1, len(runs)), runs.items(), strict=True):
        for method, curve in curves.items():
            axes.loglog(curve["seconds"][1:], curve["error"][1:], label=method, linewidth=1)
        axes.set(title=name, xlabel="processor seconds", ylabel="relative error")
    figure.axes[0].legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Train all networks by all methods from the same weights."""
    torch.set_num_threads(1)
    width, inside, budget = (8, 30, 0.3) if quick else (32, 300, 7.0)
    runs: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in PROBLEMS}
    # Work that is done on first use counts for no method.
    for method in METHODS:
        train(Informed("heat, 4 + 1-D", 4, 10), method, 0.01)
    for name, method in tqdm(
        [*itertools.product(PROBLEMS, METHODS)], desc="training", leave=False, disable=not progress
    ):
        runs[name][method] = train(Informed(name, width, inside), method, budget)
    sizes = ((8, 20), (12, 40)) if quick else ((32, 300), (64, 1200))
    cost = {f"{w} units, {n} + {n // 2} points": [step_seconds(m, w, n) for m in (ENGD, KFAC)] for w, n in sizes}
    ratios = [engd / kfac for engd, kfac in cost.values()]
    least = {name: {method: min(curve["error"]) for method, curve in own.items()} for name, own in runs.items()}
    kfac = {name: min(each[KFAC], each[GRID]) for name, each in least.items()}
    others = {name: min(each[m] for m in (*FIRST_ORDER, LBFGS)) / kfac[name] for name, each in least.items()}
    second = {name: min(each[ENGD], each[BROYDEN]) / kfac[name] for name, each in least.items()}
    first = {name: min(each[method] for method in FIRST_ORDER) / each[ENGD] for name, each in least.items()}
    claims = [
        Claim(
            "K-FAC consistently outperforms first-order methods and L-BFGS",
            "qualitative (abstract)",
            f"their least error is {span(list(others.values()))} times that of K-FAC in {budget:g} s "
            f"({'; '.join(f'{name}: {ratio:.1f}' for name, ratio in others.items())})",
            verdict(min(others.values()) > 1, max(others.values()) > 1),
        ),
        Claim(
            "K-FAC is competitive with expensive second-order methods on small problems",
            "qualitative (abstract)",
            f"the least error of ENGD and SSBroyden is {span(list(second.values()), 2)} times that of K-FAC",
            verdict(min(second.values()) > 0.5, max(second.values()) > 0.5),
        ),
        Claim(
            "K-FAC scales more favorably to larger networks",
            "qualitative (abstract)",
            "; ".join(
                f"{size}: {engd:.2f} s for a step of ENGD, {kfac:.2f} s of K-FAC" for size, (engd, kfac) in cost.items()
            ),
            verdict(ratios[1] > 1.5 * ratios[0], ratios[1] > ratios[0]),
        ),
        Claim(
            "ENGD has errors several orders of magnitude smaller than first-order methods",
            "qualitative (abstract of Müller & Zeinhofer 2023)",
            f"the least error of SOAP and Adam is {span(list(first.values()))} times that of ENGD",
            verdict(min(first.values()) > 100, max(first.values()) > 10),
        ),
        *(
            Claim(
                f"Least error within {budget:g} s, and steps: {name}",
                "",
                "; ".join(
                    f"{method} {least[name][method]:.1e} ({curve['steps'][0]:,.0f})" for method, curve in own.items()
                ),
                OURS,
            )
            for name, own in runs.items()
        ),
        *(
            Claim(
                f"Seconds to a relative error of 1e-2 and 1e-3: {name}",
                "",
                "; ".join(
                    f"{method} {_seconds(until(c, 1e-2))}, {_seconds(until(c, 1e-3))}" for method, c in own.items()
                ),
                OURS,
            )
            for name, own in runs.items()
        ),
    ]
    settings = {"width": width, "points inside": inside, "points outside": inside // 2, "seconds": budget}
    return Reproduction(claims, settings, {"runs": runs, "least": least, "seconds of a step": cost}, draw(runs))


def _seconds(found: float) -> str:
    return "-" if math.isinf(found) else f"{found:.1f}"


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
