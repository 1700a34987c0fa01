"""Solve Poisson's equation by a network to nearly six digits: self-scaled Broyden, ENGD and L-BFGS.

    python examples/poisson_network.py

A physics-informed network is small, its loss is badly conditioned, and many digits are needed. Here u(x, y) solves

    u_xx + u_yy = f on the unit square,   u = 0 on its edge,   with the solution u = sin(pi x) sin(2 pi y),

with u = x (1 - x) y (1 - y) N(x, y) for a network N with two layers of tanh, so that the edge is exact. The loss is the
mean square of the equation's residual at a grid of points, in float64. One forward pass computes its Laplacian and its
values. `hodiff.optimize.minimize(method="ssbroyden")` updates the inverse Hessian as a matrix in place;
`hodiff.optim.ENGD` takes Gauss-Newton steps; `torch.optim.LBFGS` keeps the last hundred gradients. All start from the
same weights, and stop when they make no progress, or after some thousand iterations. Seconds are processor seconds,
without the computation of the error. The error is the error of u on a finer grid, relative to u.

A run with the defaults, on one shared core of an AMD EPYC, medians of three starts:

                          least error   iterations   seconds   to 1e-3   to 1e-4   to 1e-5
    ssbroyden                 1.3e-06        2,764      12.7      0.62      1.22      2.83
    ENGD                      7.8e-06          408      21.4      1.24      1.65      3.67
    torch.optim.LBFGS         2.0e-04        2,730      13.8      0.62

ssbroyden and ENGD reach the least error of L-BFGS about five times sooner. ssbroyden gets nearly six digits, ENGD five,
L-BFGS between three and four. Iterations are the last of 3,000 at which the error was recorded.

Source: J. Urbán, P. Stefanou & J. Pons, J. Comput. Phys. 523 (2025); J. Müller & M. Zeinhofer, ICML 2023; M. Raissi,
P. Perdikaris & G. Karniadakis, J. Comput. Phys. 378 (2019).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import matplotlib as mpl
import torch
from torch import Tensor, nn

import hodiff
from hodiff.checks import along_directions

mpl.use("Agg")
import matplotlib.pyplot as plt

WIDTH, POINTS, FINER = 16, 20, 51
GOALS = (1e-3, 1e-4, 1e-5, 1e-6)
Weights = dict[str, Tensor]


@dataclass
class Course:
    """Relative error by processor seconds and by iterations."""

    seconds: list[float] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def until(self, goal: float) -> float:
        """Return the seconds until the error reached a goal, or infinity."""
        reached = [at for at, error in zip(self.seconds, self.errors, strict=True) if error <= goal]
        return reached[0] if reached else math.inf


def make_weights(seed: int, width: int = WIDTH) -> Weights:
    """Draw two hidden layers and a linear layer, with the variances of Glorot and Bengio."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [2, width, width, 1]
    weights = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        drawn = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
        weights[f"W{i}"], weights[f"b{i}"] = drawn * (2 / (inputs + outputs)) ** 0.5, drawn.new_zeros(outputs)
    return weights


def grid(count: int) -> Tensor:
    """Return points inside the square, (count^2, 2)."""
    inside = torch.linspace(0, 1, count + 2, dtype=torch.float64)[1:-1]
    return torch.cartesian_prod(inside, inside)


def network(weights: Weights, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute N with its gradient (2, points) and Laplacian in one forward pass."""
    value, slopes = points, torch.eye(2, dtype=points.dtype)[:, None].expand(2, *points.shape)
    bend = torch.zeros_like(points)
    for i in range(3):
        W = weights[f"W{i}"]
        value, slopes, bend = value @ W.T + weights[f"b{i}"], slopes @ W.T, bend @ W.T
        if i < 2:
            value = value.tanh()
            first = 1 - value**2
            bend = first * bend - 2 * value * first * slopes.square().sum(0)
            slopes = first * slopes
    return value[:, 0], slopes[..., 0], bend[:, 0]


def solution(weights: Weights, points: Tensor) -> tuple[Tensor, Tensor]:
    """Compute u and its Laplacian."""
    x, y = points.T
    across, along = x * (1 - x), y * (1 - y)
    value, (by_x, by_y), bend = network(weights, points)
    laplacian = across * along * bend - 2 * (across + along) * value
    return across * along * value, laplacian + 2 * ((1 - 2 * x) * along * by_x + (1 - 2 * y) * across * by_y)


def truth(points: Tensor) -> Tensor:
    """Compute the solution, whose Laplacian is -5 pi^2 times itself."""
    x, y = math.pi * points.T
    return torch.sin(x) * torch.sin(2 * y)


def loss(weights: Weights, points: Tensor) -> Tensor:
    """Compute the mean square of the residual, relative to the right-hand side's factor."""
    _, laplacian = solution(weights, points)
    factor = 5 * math.pi**2
    return (laplacian / factor + truth(points)).square().mean()


def error(weights: Weights) -> float:
    """Compute the error of u on the finer grid, relative to u."""
    points = grid(FINER)
    with torch.no_grad():
        off = solution(weights, points)[0] - truth(points)
    return float(off.norm() / truth(points).norm())


class Clock:
    """Clock that records the error after some iterations, and is stopped meanwhile."""

    def __init__(self) -> None:
        self.course, self._used, self._start, self._next = Course(), 0.0, time.process_time(), 1

    def note(self, iteration: int, weights: Callable[[], Weights]) -> None:
        """Record the error after an iteration."""
        self._used += time.process_time() - self._start
        if iteration >= self._next:
            self.course.seconds.append(self._used)
            self.course.iterations.append(iteration)
            self.course.errors.append(error(weights()))
            self._next = math.ceil(1.1 * iteration)
        self._start = time.process_time()


def by_broyden(start: Weights, points: Tensor, iterations: int) -> Course:
    """Minimize by `hodiff.optimize.minimize`."""
    clock, count = Clock(), 0

    def after(found: object) -> None:
        nonlocal count
        count += 1
        clock.note(count, lambda: found.x)  # type: ignore[attr-defined]  # SciPy has no types

    options = {"maxiter": iterations, "gtol": 1e-12}
    hodiff.optimize.minimize(loss, start, points, method="ssbroyden", options=options, callback=after)
    return clock.course


def by_lbfgs(start: Weights, points: Tensor, iterations: int) -> Course:
    """Minimize by `torch.optim.LBFGS`, some iterations per step, until a step changes nothing."""
    weights = {name: each.clone().requires_grad_() for name, each in start.items()}
    chunk = 10
    optimizer = torch.optim.LBFGS(
        weights.values(),
        max_iter=chunk,
        max_eval=10 * chunk,
        history_size=100,
        tolerance_grad=1e-14,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(weights, points)
        value.backward()
        return value

    clock, before, stalls = Clock(), math.inf, 0
    for count in range(chunk, iterations + 1, chunk):
        value = optimizer.step(closure).item()
        clock.note(count, lambda: weights)
        stalls = stalls + 1 if not value < before else 0
        before = min(value, before)
        if stalls >= 5 or not math.isfinite(value):
            break
    return clock.course


def by_engd(start: Weights, points: Tensor, iterations: int) -> Course:
    """Minimize by `hodiff.optim.ENGD`, until ten steps in a row change little."""
    weights = nn.ParameterDict(start)
    optimizer = hodiff.optim.ENGD(weights, damping=1e-12)

    def equation(point: Tensor) -> Tensor:
        _, laplacian = solution(dict(weights), point[None])
        return laplacian / (5 * math.pi**2) + truth(point[None])

    clock, before, stalls = Clock(), math.inf, 0
    for count in range(1, iterations + 1):
        value = optimizer.step((equation, points)).item()
        clock.note(count, lambda: dict(weights))
        stalls = stalls + 1 if not value < 0.999 * before else 0
        before = value
        if stalls >= 10:
            break
    return clock.course


WAYS = {"ssbroyden": by_broyden, "ENGD": by_engd, "torch.optim.LBFGS": by_lbfgs}


def check() -> str:
    """Run hodiff's check on the loss: all routes, gradgradcheck, SciPy's Hessian."""
    points = grid(4)
    few = along_directions(lambda x: loss(x, points), make_weights(0, 4), size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def table(courses: dict[str, list[Course]]) -> str:
    """Return medians over the starts as a Markdown table."""
    heads = ["", "least error", "iterations", "seconds", *(f"seconds to {goal:.0e}" for goal in GOALS)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for name, found in courses.items():
        times = [median(course.until(goal) for course in found) for goal in GOALS]
        cells = [
            f"{median(min(course.errors) for course in found):.1e}",
            f"{median(course.iterations[-1] for course in found):,.0f}",
            f"{median(course.seconds[-1] for course in found):.1f}",
            *("" if math.isinf(each) else f"{each:.2f}" for each in times),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sooner(ours: list[Course], theirs: list[Course]) -> float:
    """Return the median ratio of the times at which other runs, and ours, reach their least error."""
    ratios = []
    for our, their in zip(ours, theirs, strict=True):
        best = min(their.errors)
        ratios.append(their.until(best) / our.until(best))
    return median(ratios)


def draw(courses: dict[str, list[Course]], path: Path) -> None:
    """Plot the error against seconds and against iterations."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for axes, clock in zip(panels, ("seconds", "iterations"), strict=True):
        for color, (name, found) in enumerate(courses.items()):
            for index, course in enumerate(found):
                label = "_" * bool(index) + name
                axes.plot(getattr(course, clock), course.errors, color=f"C{color}", linewidth=0.9, label=label)
        axes.set(xlabel=clock, xscale="log", yscale="log")
    panels[0].set(ylabel="relative error of u", title="Poisson's equation by a network")
    panels[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve from some starts by all methods, and print the table."""
    parser = argparse.ArgumentParser(description="A network solves Poisson's equation, by three methods.")
    parser.add_argument("--iterations", type=int, default=3000, help="maximum number of iterations of each method")
    parser.add_argument("--seeds", type=int, default=3, help="number of starts")
    parser.add_argument("--quick", action="store_true", help="use one start, and fewer iterations and points")
    parser.add_argument("--output", type=Path, default=Path("figures/poisson_network.png"), help="path of the figure")
    parser.add_argument("--save", type=Path, help="path of the table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # Processor seconds are then seconds of one core.
    print(check())
    iterations, seeds, points = options.iterations, options.seeds, grid(POINTS)
    if options.quick:
        iterations, seeds, points = min(iterations, 200), 1, grid(12)
    # Warm up: work that torch and hodiff do on first use counts for no method.
    for way in WAYS.values():
        way(make_weights(0), points, 10)
    courses: dict[str, list[Course]] = {name: [] for name in WAYS}
    for seed in range(seeds):
        for name, way in WAYS.items():
            courses[name].append(way(make_weights(seed), points, iterations))
    others = courses.pop("torch.optim.LBFGS")
    times = " and ".join(f"{name} {sooner(found, others):.1f}" for name, found in courses.items())
    courses["torch.optim.LBFGS"] = others
    text = f"{table(courses)}\n\nTimes as soon as L-BFGS at its least error: {times}."
    print(f"\n{text}")
    if options.save:
        command = f"`python examples/{Path(__file__).name}`, one core, torch {torch.__version__}"
        options.save.write_text(f"# A network for Poisson's equation\n\n{command}\n\n{text}\n", encoding="utf-8")
    draw(courses, options.output)
    print(f"\nFigure: {options.output}")


if __name__ == "__main__":
    main()
