"""Errors of physics-informed networks trained by self-scaled quasi-Newton methods.

python papers/urban-2025/reproduce.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from papers.common import Claim, Reproduction, run, span, verdict

ADAM, LBFGS, BFGS, SSBFGS, SSBROYDEN = "adam", "l-bfgs-b", "bfgs", "ssbfgs", "ssbroyden"
VISCOSITY = 0.02
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Jet:
    """Function at points with its first and second derivative along an axis, each (n,) or (n, width)."""

    value: Tensor
    slope: Tensor
    curvature: Tensor

    def times(self, other: Jet) -> Jet:
        """Multiply two jets."""
        return Jet(
            self.value * other.value,
            self.slope * other.value + self.value * other.slope,
            self.curvature * other.value + 2 * self.slope * other.slope + self.value * other.curvature,
        )

    def plus(self, other: Jet) -> Jet:
        """Add two jets."""
        return Jet(self.value + other.value, self.slope + other.slope, self.curvature + other.curvature)

    def tanh(self) -> Jet:
        """Apply the hyperbolic tangent."""
        value = torch.tanh(self.value)
        first = 1 - value.square()
        return Jet(value, first * self.slope, first * (self.curvature - 2 * value * self.slope.square()))


def known(f: Callable[[Tensor], Tensor], points: Tensor, axis: int) -> Jet:
    """Compute the jet of a given function, once for all points."""
    return Jet(*hodiff.directional_derivatives(f, points, along(points, axis), order=2))


def along(points: Tensor, axis: int) -> Tensor:
    """Return the unit vector of an axis at all points."""
    return torch.zeros_like(points).index_fill_(1, torch.tensor([axis]), 1.0)


def network(parameters: Parameters, points: Tensor, axis: int) -> Jet:
    """Compute the jet of a tanh network."""
    jet = Jet(points, along(points, axis), torch.zeros_like(points))
    weights = list(parameters.values())
    for index in range(0, len(weights), 2):
        weight, bias = weights[index : index + 2]
        jet = Jet(jet.value @ weight.T + bias, jet.slope @ weight.T, jet.curvature @ weight.T)
        jet = jet.tanh() if index < len(weights) - 2 else jet
    return Jet(jet.value.squeeze(1), jet.slope.squeeze(1), jet.curvature.squeeze(1))


def poisson(x: Jet, y: Jet, points: Tensor) -> Tensor:
    """Compute the residual of u_xx + u_yy = -2 π² sin(πx) sin(πy) on the unit square."""
    return x.curvature + y.curvature + 2 * math.pi**2 * sines(points)


def burgers(x: Jet, t: Jet, points: Tensor) -> Tensor:
    """Compute the residual of u_t + u u_x = ν u_xx for x in [-1, 1] and t in [0, 1]."""
    del points
    return t.slope + x.value * x.slope - VISCOSITY * x.curvature


def sines(points: Tensor) -> Tensor:
    """Compute the solution of the Poisson problem."""
    return torch.sin(math.pi * points).prod(dim=1)


def cole_hopf(points: Tensor) -> Tensor:
    """Compute the solution of Burgers' equation from -sin(πx): a quotient of integrals by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    x, t = points.numpy()[:, :1], np.maximum(points.numpy()[:, 1:], 1e-12)
    at = x - 2 * np.sqrt(VISCOSITY * t) * nodes
    exponent = -np.cos(np.pi * at) / (2 * np.pi * VISCOSITY)
    kernel = np.exp(exponent - exponent.max(axis=1, keepdims=True)) * weights
    return torch.from_numpy(-(np.sin(np.pi * at) * kernel).sum(1) / kernel.sum(1))


@dataclass(frozen=True)
class Problem:
    """Equation on a rectangle; `boundary` + `inside` * network satisfies the boundary conditions."""

    residual: Callable[[Jet, Jet, Tensor], Tensor]
    solution: Callable[[Tensor], Tensor]
    boundary: Callable[[Tensor], Tensor]
    inside: Callable[[Tensor], Tensor]
    low: tuple[float, float]


PROBLEMS = {
    "Poisson": Problem(poisson, sines, lambda p: 0 * p[:, 0], lambda p: (p * (1 - p)).prod(dim=1), (0.0, 0.0)),
    "Burgers": Problem(
        *(burgers, cole_hopf, lambda p: -torch.sin(math.pi * p[:, 0]), lambda p: p[:, 1] * (1 - p[:, 0] ** 2)),
        (-1.0, 0.0),
    ),
}


class Informed:
    """Network that solves one of the problems, at fixed points up to (1, 1)."""

    def __init__(self, name: str, width: int, count: int, seed: int):
        self.problem = PROBLEMS[name]
        torch.manual_seed(seed)
        layers = [nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 1)]
        for layer in layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        start = nn.Sequential(*layers).double().named_parameters()
        self.start = {key: parameter.detach().clone() for key, parameter in start}
        low = torch.tensor(self.problem.low, dtype=torch.float64)
        self.points = low + (1 - low) * torch.quasirandom.SobolEngine(2, scramble=True, seed=seed).draw(count).double()
        axis = torch.linspace(0, 1, 41, dtype=torch.float64)
        self.tests = low + (1 - low) * torch.cartesian_prod(axis, axis)
        self.expected = self.problem.solution(self.tests)
        given = (self.problem.boundary, self.problem.inside)
        self.given = [[known(f, self.points, axis) for f in given] for axis in (0, 1)]

    def jets(self, parameters: Parameters) -> list[Jet]:
        """Compute the solution's jets along both axes."""
        return [
            boundary.plus(inside.times(network(parameters, self.points, axis)))
            for axis, (boundary, inside) in enumerate(self.given)
        ]

    def loss(self, parameters: Parameters) -> Tensor:
        """Compute the mean squared residual of the equation."""
        return self.problem.residual(*self.jets(parameters), self.points).square().mean()

    def error(self, parameters: Parameters) -> float:
        """Compute the relative error of the solution on a grid, in the 2-norm."""
        raw = network(parameters, self.tests, 0).value
        found = self.problem.boundary(self.tests) + self.problem.inside(self.tests) * raw
        return ((found - self.expected).norm() / self.expected.norm()).item()


def solve(problem: Informed, method: str, iterations: int) -> dict[str, list[float]]:
    """Return losses and errors at the start and at twenty points of a run."""
    found: dict[str, list[float]] = {"iteration": [], "loss": [], "error": []}

    def note(iteration: int, x: Parameters, loss: float) -> None:
        if iteration % max(1, iterations // 20) == 0:
            for key, value in zip(found, (iteration, loss, problem.error(x)), strict=True):
                found[key].append(value)

    if method == ADAM:
        x = {name: each.clone().requires_grad_() for name, each in problem.start.items()}
        optimizer = torch.optim.Adam(x.values(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
        for iteration in range(iterations + 1):
            optimizer.zero_grad()
            loss = problem.loss(x)
            note(iteration, {name: each.detach() for name, each in x.items()}, loss.item())
            loss.backward()
            optimizer.step()
            schedule.step()
        return found
    count = 0

    def watch(result: Any) -> None:
        nonlocal count
        count += 1
        note(count, result.x, float(result.fun))

    note(0, problem.start, problem.loss(problem.start).item())
    options: dict[str, Any] = {"maxiter": iterations, "gtol": 1e-14}
    if method == LBFGS:
        options |= {"ftol": 0.0, "maxfun": 10**6, "maxcor": 30}
    end = hodiff.optimize.minimize(problem.loss, problem.start, method=method, options=options, callback=watch)
    for key, value in zip(found, (count, float(end.fun), problem.error(end.x)), strict=True):
        found[key].append(value)
    return found


def draw(runs: dict[str, dict[str, list[dict[str, list[float]]]]]) -> Figure:
    """Plot errors by iteration, one panel per problem."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (name, methods) in zip(figure.subplots(1, len(runs)), runs.items(), strict=True):
        for index, (method, curves) in enumerate(methods.items()):
            for seed, curve in enumerate(curves):
                label = None if seed else method
                axes.semilogy(curve["iteration"], curve["error"], color=f"C{index}", label=label)
        axes.set(title=name, xlabel="iteration", ylabel="relative error")
    figure.axes[0].legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Solve both equations by all methods from the same starts."""
    torch.set_num_threads(1)
    width, count, iterations = (8, 60, 60) if quick else (16, 300, 1000)
    seeds = range(1)
    methods = (ADAM, LBFGS, BFGS, SSBFGS, SSBROYDEN)
    runs: dict[str, dict[str, list[dict[str, list[float]]]]] = {
        name: {method: [] for method in methods} for name in PROBLEMS
    }
    work = [(name, method, seed) for name in PROBLEMS for method in methods for seed in seeds]
    for name, method, seed in tqdm(work, desc="training", leave=False, disable=not progress):
        runs[name][method].append(solve(Informed(name, width, count, seed), method, iterations))

    def end(name: str, method: str, what: str) -> float:
        """Return the geometric mean over starts at the end."""
        return float(np.exp(np.mean([math.log(curve[what][-1]) for curve in runs[name][method]])))

    losses = {name: {method: end(name, method, "loss") for method in methods} for name in PROBLEMS}
    errors = {name: {method: end(name, method, "error") for method in methods} for name in PROBLEMS}
    best = {name: min(each[SSBFGS], each[SSBROYDEN]) for name, each in errors.items()}
    from_adam = [losses[name][ADAM] / losses[name][SSBROYDEN] for name in PROBLEMS]
    from_bfgs = [losses[name][BFGS] / losses[name][SSBROYDEN] for name in PROBLEMS]
    ss_bfgs = [losses[name][SSBFGS] / losses[name][SSBROYDEN] for name in PROBLEMS]
    claims = [
        Claim(
            "A better optimizer makes the loss several orders of magnitude smaller",
            "several orders of magnitude (abstract)",
            "; ".join(f"{n}: {e[ADAM]:.0e} by Adam, {e[SSBROYDEN]:.0e} by ssbroyden" for n, e in losses.items())
            + f", after {iterations:,} iterations",
            verdict(min(from_adam) > 100, min(from_adam) > 10),
        ),
        Claim(
            "Self-scaled Broyden's method is better than BFGS",
            "qualitative",
            f"its loss is {span(from_bfgs)} times smaller than that of bfgs ({', '.join(PROBLEMS)})",
            verdict(min(from_bfgs) > 2, max(from_bfgs) > 2),
        ),
        Claim(
            "Self-scaled Broyden's method is better than self-scaled BFGS",
            "qualitative",
            f"its loss is {span(ss_bfgs)} times smaller than that of ssbfgs",
            verdict(min(ss_bfgs) > 1.1, max(ss_bfgs) > 1.1),
        ),
        Claim(
            "Networks of two layers of 20 to 30 units are as accurate as differences on thousands of points",
            "qualitative (abstract)",
            "; ".join(f"{name}: relative error {value:.0e}" for name, value in best.items())
            + f", {width} units a layer; differences of second order on 50 x 50 points: about {differences():.0e}",
            verdict(max(best.values()) < differences(), min(best.values()) < differences()),
        ),
    ]
    settings = {"width": width, "points": count, "iterations": iterations, "starts": len(seeds), "ν": VISCOSITY}
    return Reproduction(claims, settings, {"runs": runs, "losses": losses, "errors": errors}, draw(runs))


def differences(n: int = 50) -> float:
    """Return the relative error of the five-point scheme for the Poisson problem, whose solution is an eigenvector."""
    return math.pi**2 / (2 * n**2 * (1 - math.cos(math.pi / n))) - 1


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
