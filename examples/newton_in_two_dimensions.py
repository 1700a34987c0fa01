"""Gradient descent, Newton's method, a trust region and BFGS in two dimensions, step by step.

    python examples/newton_in_two_dimensions.py

This script draws the figure of docs/guides/optimizers.md.

Rosenbrock's function has a narrow curved valley. Himmelblau's function has four minima with saddles between them.
Gradient descent follows the steepest direction, and is still in the valley after 5,000 steps. Newton's method goes to
the stationary point of the quadratic model. It takes few steps, but may go uphill, and finds a saddle of Himmelblau's
function. "trust-ncg" minimises the same model in a ball, the trust region, and so only goes downhill; "bfgs" estimates
the curvature from gradients. The last column follows from the eigenvalues of the Hessian at the end.

SciPy does not report the radii of the balls. They follow from the iterates by its rule: the radius is divided by four
where the value fell by less than a quarter of the model's prediction. It is doubled where the value fell by more than
three quarters and the step was as long as allowed.

Source: J. Nocedal & S. J. Wright, Numerical Optimization, 2nd ed. (2006), sections 2.2 and 3.3, and algorithm 4.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor
from torch.func import grad

import hodiff

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle

Function = Callable[[Tensor], Tensor]


def rosenbrock(x: Tensor) -> Tensor:
    """Compute Rosenbrock's function, with the minimum 0 at (1, 1)."""
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


def himmelblau(x: Tensor) -> Tensor:
    """Compute Himmelblau's function, with four minima of value 0, one of them at (3, 2), four saddles and a maximum."""
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


@dataclass(frozen=True)
class Problem:
    """Function, start, step size of gradient descent, and the part of the plane that is drawn."""

    f: Function
    start: tuple[float, float]
    rate: float
    window: tuple[float, float, float, float]


PROBLEMS = (
    Problem(rosenbrock, (-1.2, 1.0), 1.5e-3, (-1.8, 1.5, -0.7, 2.6)),
    Problem(himmelblau, (-0.5, 3.5), 1e-2, (-5.0, 5.0, -5.0, 5.0)),
)


@dataclass(frozen=True)
class Descent:
    """Iterates of a method, and the number of Hessians or products with the Hessian that they took."""

    method: str
    path: list[Tensor]
    curvature: str = ""


def gradient_descent(problem: Problem, steps: int) -> Descent:
    """Run gradient descent until the gradient is small or the steps are used up."""
    path = [torch.tensor(problem.start, dtype=torch.float64)]
    while len(path) <= steps and (g := grad(problem.f)(path[-1])).norm() > 1e-5:
        path.append(path[-1] - problem.rate * g)
    return Descent("gradient descent", path)


def newton(problem: Problem, steps: int) -> Descent:
    """Run Newton's method, which goes to the stationary point of each quadratic model."""
    path = [torch.tensor(problem.start, dtype=torch.float64)]
    while len(path) <= steps and (g := grad(problem.f)(path[-1])).norm() > 1e-5:
        path.append(path[-1] - torch.linalg.solve(hodiff.hessian(problem.f)(path[-1]), g))
    return Descent("Newton", path, f"{len(path) - 1} Hessians")


def by_minimize(problem: Problem, method: str) -> Descent:
    """Run `hodiff.optimize.minimize`, whose callback records each iterate."""
    path = [torch.tensor(problem.start, dtype=torch.float64)]
    found = hodiff.optimize.minimize(problem.f, path[0], method=method, callback=lambda state: path.append(state.x))
    return Descent(method, path, f"{found.nhvp} products" if found.nhvp else "")


def trust_radii(f: Function, path: Sequence[Tensor]) -> list[float]:
    """Compute the radius of trust-ncg in each iteration from its iterates."""
    radii = [1.0]
    for x, following in pairwise(path):
        radius, step = radii[-1], following - x
        predicted = -(grad(f)(x) + hodiff.hvp(f, x, step) / 2) @ step
        # A rejected step leaves x unchanged: the value fell by too little, or rose.
        ratio = (f(x) - f(following)) / predicted if step.any() else 0.0
        if ratio < 0.25:
            radius /= 4
        elif ratio > 0.75 and step.norm() > (1 - 1e-9) * radius:
            radius *= 2
        radii.append(radius)
    return radii[:-1]


def kind(f: Function, x: Tensor) -> str:
    """Return the kind of a point: minimum, maximum, saddle, or on its way."""
    if grad(f)(x).norm() > 1e-3:
        return "on its way"
    lowest, highest = torch.linalg.eigvalsh(hodiff.hessian(f)(x)).tolist()
    return "minimum" if lowest > 0 else "maximum" if highest < 0 else "saddle"


def draw(axes: Axes, problem: Problem, descents: Sequence[Descent]) -> None:
    """Draw contours, iterates and trust regions."""
    left, right, bottom, top = problem.window
    x, y = torch.meshgrid(torch.linspace(left, right, 200), torch.linspace(bottom, top, 200), indexing="xy")
    axes.contour(x, y, problem.f(torch.stack([x, y])), levels=torch.logspace(-1, 3, 13), colors="0.8", linewidths=0.7)
    for descent in descents:
        (line,) = axes.plot(*torch.stack(descent.path).T, ".-", markersize=4, linewidth=1, label=descent.method)
        if descent.method == "trust-ncg":
            for centre, radius in zip(descent.path, trust_radii(problem.f, descent.path), strict=False):
                axes.add_patch(
                    Circle((float(centre[0]), float(centre[1])), radius, fill=False, color=line.get_color(), alpha=0.25)
                )
    axes.set(title=problem.f.__name__, xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axes.legend(loc="lower right", fontsize="small")


def check() -> list[str]:
    """Run hodiff's check on both functions: all routes, gradgradcheck, SciPy's Hessian."""
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    return [hodiff.assert_differentiable(problem.f, start, vmap=False).summary for problem in PROBLEMS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Descend, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description="Gradient descent, Newton, a trust region and BFGS in the plane.")
    parser.add_argument("--quick", action="store_true", help="take 100 steps of gradient descent, without the check")
    parser.add_argument(
        "--output", type=Path, default=Path("figures/newton_in_two_dimensions.png"), help="path of the figure"
    )
    options = parser.parse_args(arguments)
    figure, panels = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    print(f"{'':14}{'':18}{'steps':>6}{'':>14}{'ends at':>20}{'value':>11}")
    for axes, problem in zip(panels, PROBLEMS, strict=True):
        descents = [
            gradient_descent(problem, 100 if options.quick else 5000),
            newton(problem, 50),
            by_minimize(problem, "trust-ncg"),
            by_minimize(problem, "bfgs"),
        ]
        for descent in descents:
            end = descent.path[-1]
            place = f"({end[0]:.4f}, {end[1]:.4f})"
            print(
                f"{problem.f.__name__:14}{descent.method:18}{len(descent.path) - 1:>6}{descent.curvature:>14}"
                f"{place:>20}{problem.f(end):>11.2e}  {kind(problem.f, end)}"
            )
        draw(axes, problem, descents)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=72)
    plt.close(figure)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(*check(), sep="\n")


if __name__ == "__main__":
    main()
