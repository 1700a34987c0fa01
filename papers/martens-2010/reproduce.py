"""Hessian-free optimization of a deep autoencoder for curves, and gradient methods in the same time.

python papers/martens-2010/reproduce.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from papers.common import OURS, Claim, Reproduction, run, verdict
from papers.networks import sparse_sigmoid

CODE = 6  # units in the middle, linear, as in the paper
HF, PRECONDITIONED = "Hessian-free", "Hessian-free, preconditioned"
MOMENTUM, CG, ADAM = "gradient descent with momentum", "nonlinear conjugate gradients", "Adam"
RATES = {MOMENTUM: (0.003, 0.01, 0.03, 0.1), ADAM: (0.001, 0.003, 0.01)}
GAUSS_NEWTON, HESSIAN = "Gauss-Newton", "Hessian"
DAMPINGS = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0)
# Cost of a Gauss-Newton product: a tangent and a cotangent through the network, and the values that both need.
GRADIENTS_OF_A_PRODUCT = 3


def curves(count: int, side: int) -> Tensor:
    """Return images (count, side * side) of random smooth curves: Bézier curves of three points, drawn softly."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = torch.rand(3, count, 1, 2, generator=generator)
    t = torch.linspace(0, 1, 40)[:, None]
    points = ((1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c) * (side - 3) + 1
    places = torch.arange(side, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(places, places, indexing="ij"), dim=-1).view(1, -1, 1, 2)
    distances = (grid - points[:, None]).square().sum(-1).amin(-1)
    return torch.exp(-distances)


@dataclass
class Problem:
    """Images, and losses of a network that reconstructs them."""

    images: Tensor
    widths: list[int]
    start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.start = {name: each.clone() for name, each in sparse_sigmoid(self.widths, CODE).state_dict().items()}

    def network(self) -> nn.Sequential:
        """Return a network with the initial weights."""
        network = sparse_sigmoid(self.widths, CODE)
        network.load_state_dict(self.start)
        return network

    def loss(self, outputs: Tensor) -> Tensor:
        """Compute the cross-entropy of an image's pixels, which is minimized."""
        return F.binary_cross_entropy_with_logits(outputs, self.images, reduction="sum") / len(self.images)

    def error(self, outputs: Tensor) -> float:
        """Compute the squared error of an image, which is reported."""
        return (torch.sigmoid(outputs) - self.images).square().sum(1).mean().item()


@dataclass(frozen=True)
class Budget:
    """Limit of a method: processor seconds, or gradients, whose number is the same on all machines."""

    seconds: float = math.inf
    gradients: float = math.inf

    def part(self, of: int) -> Budget:
        """Return a fraction of the budget."""
        return Budget(self.seconds / of, self.gradients / of)

    def is_spent(self, seconds: float, gradients: int) -> bool:
        """Return True if seconds or gradients are used up."""
        return seconds >= self.seconds or gradients >= self.gradients


@dataclass
class Curve:
    """Squared error by processor seconds, and cross-entropy by products of Hessian-free optimization."""

    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    products: list[int] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Least error."""
        return min(self.errors)


def hessian_free(problem: Problem, steps: int, iterations: int, preconditioner: str | None, progress: bool) -> Curve:
    """Run some steps of Hessian-free optimization."""
    network = problem.network()
    optimizer = hodiff.optim.HessianFree(
        network.parameters(), damping=1.0, cg_iterations=iterations, preconditioner=preconditioner
    )
    found, spent, products = Curve(), 0.0, 0
    for _ in tqdm(range(steps), desc=HF, leave=False, disable=not progress):
        start = time.process_time()
        loss = optimizer.step(lambda: (network(problem.images), problem.loss))
        spent += time.process_time() - start
        products += optimizer.last.cg_iterations
        with torch.no_grad():
            outputs = network(problem.images)
        found.seconds.append(spent)
        found.errors.append(problem.error(outputs))
        found.losses.append(loss.item())
        found.products.append(products)
    return found


def by_loop(problem: Problem, make: Callable[[Any], torch.optim.Optimizer], budget: Budget) -> Curve:
    """Run a torch optimizer until its budget is spent."""
    network = problem.network()
    optimizer = make(network.parameters())
    found, start, step = Curve(), time.process_time(), 0
    while not budget.is_spent(time.process_time() - start, step):
        optimizer.zero_grad()
        outputs = network(problem.images)
        problem.loss(outputs).backward()
        optimizer.step()
        if step % 20 == 0:
            found.seconds.append(time.process_time() - start)
            found.errors.append(problem.error(outputs.detach()))
        step += 1
    return found


def by_scipy(problem: Problem, budget: Budget) -> Curve:
    """Run SciPy's nonlinear conjugate gradients until the budget is spent."""
    network = problem.network()
    x = {name: parameter.detach() for name, parameter in network.named_parameters()}
    found, start, calls = Curve(), time.process_time(), 0

    def objective(parameters: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return problem.loss(functional_call(network, parameters, (problem.images,)))

    def watch(result: Any) -> None:
        found.seconds.append(time.process_time() - start)
        with torch.no_grad():
            found.errors.append(problem.error(functional_call(network, result.x, (problem.images,))))
        if budget.is_spent(found.seconds[-1], calls):
            raise StopIteration

    hodiff.optimize.minimize(objective, x, method="cg", options={"maxiter": 100_000, "gtol": 0.0}, callback=watch)
    return found


def newton(problem: Problem, curvature: str, damping: float, steps: int, iterations: int) -> list[float]:
    """Return losses of Newton steps with either matrix, and equal damping, products and line search."""
    network = problem.network()
    optimizer = hodiff.optim.NewtonCG(
        network.parameters(),
        damping=damping,
        curvature="gauss-newton" if curvature == GAUSS_NEWTON else "hessian",
        cg_iterations=iterations,
        line_search_fn="backtracking",
    )

    def closure() -> Any:
        if curvature == GAUSS_NEWTON:
            return network(problem.images), problem.loss
        return problem.loss(network(problem.images))

    return [optimizer.step(closure).item() for _ in range(steps)]


def draw(images: Tensor, side: int, found: dict[str, Curve], newtons: dict[str, list[float]]) -> Figure:
    """Plot some curves, errors by time, and losses by matrix."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.imshow(images[:16].view(4, 4, side, side).permute(0, 2, 1, 3).reshape(4 * side, 4 * side), cmap="gray_r")
    left.set_axis_off()
    for name, curve in found.items():
        middle.semilogy(curve.seconds, curve.errors, label=name)
    middle.set(xlabel="processor seconds", ylabel="squared error of an image")
    middle.legend(fontsize=6)
    for name, losses in newtons.items():
        right.semilogy(losses, marker=".", label=name)
    right.set(xlabel="Newton steps", ylabel="cross-entropy of an image")
    right.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Train the same network from the same weights by all methods."""
    torch.set_num_threads(1)
    full = 300, 12, [144, 60, 30, CODE, 30, 60, 144], 25, 50
    count, side, widths, steps, iterations = (100, 8, [64, 30, CODE, 30, 64], 12, 30) if quick else full
    problem = Problem(curves(count, side), widths)
    found = {
        HF: hessian_free(problem, steps, iterations, None, progress),
        PRECONDITIONED: hessian_free(problem, steps, iterations, "empirical-fisher", progress),
    }
    seconds, gradients = found[HF].seconds[-1], GRADIENTS_OF_A_PRODUCT * found[HF].products[-1]
    # A small problem's seconds are mostly Python overhead, and differ between machines.
    budget = Budget(gradients=gradients) if quick else Budget(seconds=seconds)
    alike = "with as many gradients" if quick else "in the same time"
    chosen = {}
    makers = {
        MOMENTUM: lambda rate: lambda p: torch.optim.SGD(p, lr=rate, momentum=0.95),
        ADAM: lambda rate: lambda p: torch.optim.Adam(p, lr=rate),
    }
    for name, make in makers.items():
        # Every rate gets a tenth of the budget, the best rate then all of it.
        trials = {rate: by_loop(problem, make(rate), budget.part(10)).best for rate in RATES[name]}
        chosen[name] = min(trials, key=lambda rate, trials=trials: trials[rate])
        found[name] = by_loop(problem, make(chosen[name]), budget)
    found[CG] = by_scipy(problem, budget)
    newtons = {
        kind: {each: newton(problem, kind, each, steps, iterations) for each in (DAMPINGS[2:5] if quick else DAMPINGS)}
        for kind in (GAUSS_NEWTON, HESSIAN)
    }

    best = {name: curve.best for name, curve in found.items()}
    others = min(best[MOMENTUM], best[CG])
    with torch.no_grad():
        first = problem.error(problem.network()(problem.images))
    mean = (problem.images.mean(0) - problem.images).square().sum(1).mean().item()
    plain, better = found[HF], found[PRECONDITIONED]
    budget = min(plain.products[-1], better.products[-1])
    at = {
        name: min(loss for loss, products in zip(each.losses, each.products, strict=True) if products <= budget)
        for name, each in ((HF, plain), (PRECONDITIONED, better))
    }
    ends = {name: {damping: losses[-1] for damping, losses in each.items()} for name, each in newtons.items()}
    by_matrix = {name: min(each, key=lambda damping, of=each: of[damping]) for name, each in ends.items()}
    lowest = {name: ends[name][damping] for name, damping in by_matrix.items()}
    ahead = sum(ends[GAUSS_NEWTON][damping] < end for damping, end in ends[HESSIAN].items())
    claims = [
        Claim(
            "From random weights, it reaches a much lower error than gradient methods",
            "qualitative (lower than theirs after pre-training, abstract)",
            f"squared error {best[HF]:.2f}; {alike} {best[MOMENTUM]:.2f} by {MOMENTUM}, {best[CG]:.2f} by {CG}",
            verdict(best[HF] < 0.5 * others, best[HF] < others),
        ),
        Claim(
            "Gradient descent stops before it has learned much",
            "qualitative",
            f"{best[MOMENTUM]:.1f}, where the mean image has {mean:.1f}, and the start {first:.1f}",
            verdict(best[MOMENTUM] > 0.5 * mean, best[MOMENTUM] > 2 * best[HF]),
        ),
        Claim(
            "With the preconditioner, conjugate gradients reach a lower loss after the same number of products",
            "qualitative",
            f"cross-entropy {at[PRECONDITIONED]:.2f} with, {at[HF]:.2f} without, by {budget:,} products",
            verdict(at[PRECONDITIONED] < 0.98 * at[HF], at[PRECONDITIONED] < 1.02 * at[HF]),
        ),
        Claim(
            "The Gauss-Newton matrix gives better steps than the Hessian",
            "qualitative",
            f"cross-entropy after {steps} steps, each with the best of {len(ends[HESSIAN])} dampings: "
            f"{lowest[GAUSS_NEWTON]:.2f} against {lowest[HESSIAN]:.2f}; with equal damping it is ahead at {ahead}",
            verdict(lowest[GAUSS_NEWTON] < 0.95 * lowest[HESSIAN], lowest[GAUSS_NEWTON] < lowest[HESSIAN]),
        ),
        Claim(
            f"Adam {alike}",
            "not in the paper, which is older",
            f"squared error {best[ADAM]:.2f}, {best[ADAM] / best[HF]:.2g} times that of {HF}",
            OURS,
        ),
    ]
    settings = {"curves": count, "widths": widths, "steps": steps, "products a step": iterations, "rates": chosen}
    settings["dampings"] = by_matrix
    data = {
        "seconds": seconds,
        "best": best,
        "errors": {name: {"seconds": c.seconds[::5], "errors": c.errors[::5]} for name, c in found.items()},
        "newton": newtons,
    }
    shown = {f"{name}, damping {by_matrix[name]:g}": each[by_matrix[name]] for name, each in newtons.items()}
    return Reproduction(claims, settings, data, draw(problem.images, side, found, shown))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
