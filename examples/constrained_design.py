"""Constrained design: the lightest truss, the cheapest welded beam, and the multiplier of each limit.

    python examples/constrained_design.py

Both are test problems of structural optimization with known optima. The first is a truss of three bars with a limit on
the stress in each bar. The second is a beam that is welded to a wall, with limits on stresses, buckling, deflection and
dimensions. A design is a dict. Its constraints are functions in torch that have to be at most zero. "trust-constr" uses
their exact Jacobians and Hessians, "slsqp" the Jacobians.

The multiplier of a constraint is a price: if its limit is relaxed by a small amount, the optimal cost falls by the
multiplier times this amount. The last column relaxes each limit by 1e-5 and designs again. If an optimum is missed by
more than 1e-6, relatively, the script ends with exit status 1.

Source: C. A. Coello Coello, Computers in Industry 41 (2000) for the form of the beam; L. C. Cagnina, S. C. Esquivel &
C. A. Coello Coello, Informatica 32 (2008) for its optimum, 1.724852. The optimum of the truss in closed form is 100
(sqrt(2) + sqrt(3/2)). J. Nocedal & S. J. Wright, Numerical Optimization, 2nd ed. (2006), section 12.8 for multipliers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import NonlinearConstraint
from torch import Tensor

import hodiff

Design = dict[str, Tensor]

MISSES = 1e-6  # relative
RELAXED = 1e-5
TIGHT = {
    # The gradient may vanish while the barrier still keeps designs off their limits; xtol checks both.
    "trust-constr": {"gtol": 1e-14, "xtol": 1e-9, "barrier_tol": 1e-9},
    "slsqp": {"ftol": 1e-14},
}


@dataclass(frozen=True)
class Problem:
    """Design problem with its cost, constraints and optimum."""

    name: str
    cost: Callable[[Design], Tensor]
    constraints: Callable[[Design], dict[str, Tensor]]  # at most zero, by name
    start: Design
    bounds: tuple[float | Design, float | Design]
    optimum: float


def truss_weight(x: Design) -> Tensor:
    """Compute the volume of two outer bars and an inner bar, 100 long below the wall."""
    return 100 * (2 * math.sqrt(2) * x["outer"] + x["inner"])


def truss_stresses(x: Design, load: float = 2.0, limit: float = 2.0) -> dict[str, Tensor]:
    """Compute the stress of each bar over the limit, less one."""
    outer, inner, root = x["outer"], x["inner"], math.sqrt(2)
    shared = load / limit / (root * outer**2 + 2 * outer * inner)
    return {
        "stress, bar 1": (root * outer + inner) * shared - 1,
        "stress, bar 2": inner * shared - 1,
        "stress, bar 3": load / limit / (outer + root * inner) - 1,
    }


def beam_cost(x: Design) -> Tensor:
    """Compute the cost of welding and steel."""
    return 1.10471 * x["weld"] ** 2 * x["length"] + 0.04811 * x["height"] * x["width"] * (14 + x["length"])


def beam_limits(x: Design) -> dict[str, Tensor]:
    """Compute limited quantities over their limits, less one, of a 14 inch beam with a load of 6,000 pounds."""
    h, l, t, b = x["weld"], x["length"], x["height"], x["width"]  # noqa: E741  # the names of the literature
    load, span, E, G = 6000.0, 14.0, 30e6, 12e6
    arm = (l**2 / 4 + ((h + t) / 2) ** 2).sqrt()
    direct = load / (math.sqrt(2) * h * l)
    inertia = 2 * math.sqrt(2) * h * l * (l**2 / 12 + ((h + t) / 2) ** 2)
    torsion = load * (span + l / 2) * arm / inertia
    shear = (direct**2 + direct * torsion * l / arm + torsion**2).sqrt()
    buckling = 4.013 * E * t * b**3 / 6 / span**2 * (1 - t / (2 * span) * math.sqrt(E / (4 * G)))
    return {
        "shear stress": shear / 13600 - 1,
        "bending stress": 6 * load * span / (b * t**2) / 30000 - 1,
        "buckling": load / buckling - 1,
        "deflection": 4 * load * span**3 / (E * t**3 * b) / 0.25 - 1,
        "weld within width": h - b,
    }


def design(outer: float, inner: float) -> Design:
    """Return the design of a truss."""
    return {"outer": torch.tensor(outer, dtype=torch.float64), "inner": torch.tensor(inner, dtype=torch.float64)}


def beam(weld: float, length: float, height: float, width: float) -> Design:
    """Return the design of a beam, in inches."""
    measures = {"weld": weld, "length": length, "height": height, "width": width}
    return {name: torch.tensor(measure, dtype=torch.float64) for name, measure in measures.items()}


def make_problems() -> list[Problem]:
    """Return both problems."""
    lightest = 100 * (math.sqrt(2) + math.sqrt(1.5))
    limits = beam(0.125, 0.1, 0.1, 0.1), beam(2.0, 10.0, 10.0, 2.0)
    return [
        Problem("three-bar truss", truss_weight, truss_stresses, design(1.0, 1.0), (1e-3, 1.0), lightest),
        Problem("welded beam", beam_cost, beam_limits, beam(0.5, 5.0, 9.0, 0.5), limits, 1.724852),
    ]


def optimize(problem: Problem, method: str, relaxed: str | None = None) -> Any:
    """Find the best design by a method, with at most one limit relaxed."""
    upper = [RELAXED if name == relaxed else 0.0 for name in problem.constraints(problem.start)]
    limits = NonlinearConstraint(lambda x: torch.stack([*problem.constraints(x).values()]), -math.inf, upper)
    return hodiff.optimize.minimize(
        problem.cost, problem.start, method=method, bounds=problem.bounds, constraints=limits, options=TIGHT[method]
    )


def report(problem: Problem) -> None:
    """Design by both methods, print the table, and raise if the optimum is missed."""
    print(f"{problem.name}, optimum {problem.optimum:.6f}")
    for method in TIGHT:
        found = optimize(problem, method)
        measures = ", ".join(f"{name} {measure.item():.6f}" for name, measure in found.x.items())
        print(f"  {method:14}{found.fun:.6f} in {found.nit} iterations: {measures}")
        if not abs(found.fun / problem.optimum - 1) <= MISSES:
            raise hodiff.CheckError(f"{problem.name} by {method}: {found.fun:.6f}, not {problem.optimum:.6f}")
        if method == "trust-constr":
            multipliers, values = found.v[0], problem.constraints(found.x)
    print(f"  {'':20}{'value':>12}{'multiplier':>13}{'measured':>11}")
    cost = optimize(problem, "slsqp").fun
    for (name, value), multiplier in zip(values.items(), multipliers, strict=True):
        gain = (cost - optimize(problem, "slsqp", relaxed=name).fun) / RELAXED
        print(f"  {name:20}{value.item():>12.2e}{multiplier:>13.5f}{gain:>11.5f}")


def check(problem: Problem) -> str:
    """Run hodiff's check on cost and constraints together: all routes, gradgradcheck, SciPy's Hessian."""

    def lagrangian(x: Tensor) -> Tensor:
        named = dict(zip(problem.start, x, strict=True))
        return problem.cost(named) + torch.stack([*problem.constraints(named).values()]).square().sum()

    return hodiff.assert_differentiable(lagrangian, torch.stack([*problem.start.values()]), vmap=False).summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both problems."""
    argparse.ArgumentParser(description="Two designs with limits, and the prices of these.").parse_args(arguments)
    torch.set_num_threads(1)
    for problem in make_problems():
        report(problem)
        print(f"  {check(problem)}\n")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as missed:
        sys.exit(f"The optimum is missed: {missed}")
