"""Solve differential equations by Taylor series, and compare the error with SciPy's DOP853.

    python examples/ode_taylor.py

`hodiff.taylor.odeint_taylor` computes the series of the solution at the start of each step, to an order that depends on
the tolerance, and evaluates it at the end of the step. There are two equations. The first is a planet on an ellipse of
eccentricity 0.2, whose position Kepler's equation gives. The second is Van der Pol's oscillator, whose reference
solution comes from series of order 30 at the tightest tolerance. SciPy's method, which is independent, agrees with it
up to its own errors.

With steps of fixed size, the error over one turn falls as the power p of the step for series of order p: the slopes in
the left figure are 1.96, 3.98, 7.94 and 16.1 for orders 2 to 16. With adaptive steps, a Taylor method gets more digits
by a higher order rather than by more steps. From a tolerance of 1e-3 to 1e-13, the number of calls of the right-hand
side grows by a factor of 3.5 and 3.9, and by a factor of twelve for DOP853, whose order is 8. But calls with series
cost more, and SciPy is 50 to 100 times as fast on one small system. A thousand planets at once share their steps and
torch's overhead: they take 0.33 s, and 0.76 s by SciPy one after another (one core of an AMD EPYC).

Source: A. Jorba & M. Zou, Experimental Mathematics 14(1), 2005; E. Hairer, S. Norsett & G. Wanner, Solving Ordinary
Differential Equations I, 2nd ed. (1993), sections I.8 and II.10, for series and DOP853.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import hodiff
from hodiff.taylor import odeint_taylor

mpl.use("Agg")
import matplotlib.pyplot as plt

ECCENTRICITY, STIFFNESS = 0.2, 1.0
ORDERS = (2, 4, 8, 16)
TOLERANCES = tuple(10.0**-k for k in range(3, 14))


def kepler(t: Tensor, y: Tensor) -> Tensor:
    """Compute the time derivative of position and velocity in a plane, (..., 4)."""
    q, v = y[..., :2], y[..., 2:]
    return torch.cat([v, -q * q.square().sum(-1, keepdim=True) ** -1.5], -1)


def kepler_of_numpy(t: float, y: Any) -> list[float]:
    """Compute the right-hand side of `kepler` for SciPy."""
    cube = (y[0] * y[0] + y[1] * y[1]) ** -1.5
    return [y[2], y[3], -y[0] * cube, -y[1] * cube]


def van_der_pol(t: Tensor, y: Tensor) -> Tensor:
    """Compute the time derivative of position and velocity, (..., 2)."""
    x, v = y.unbind(-1)
    return torch.stack([v, STIFFNESS * (1 - x * x) * v - x], -1)


def van_der_pol_of_numpy(t: float, y: Any) -> list[float]:
    """Compute the right-hand side of `van_der_pol` for SciPy."""
    return [y[1], STIFFNESS * (1 - y[0] * y[0]) * y[1] - y[0]]


def at_perihelion(eccentricity: float) -> Tensor:
    """Return the start of a planet on an ellipse with half axis 1 and period 2 pi."""
    speed = math.sqrt((1 + eccentricity) / (1 - eccentricity))
    return torch.tensor([1 - eccentricity, 0.0, 0.0, speed], dtype=torch.float64)


def on_the_ellipse(eccentricity: float, t: float) -> Tensor:
    """Compute position and velocity by Newton's iteration for Kepler's equation E - e sin E = t."""
    e, anomaly = eccentricity, t
    for _ in range(20):
        anomaly -= (anomaly - e * math.sin(anomaly) - t) / (1 - e * math.cos(anomaly))
    c, s, axis = math.cos(anomaly), math.sin(anomaly), math.sqrt(1 - e * e)
    rate = 1 / (1 - e * c)
    return torch.tensor([c - e, axis * s, -s * rate, axis * c * rate], dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    """Equation for torch and for SciPy, with its start, its end time and the exact final state."""

    name: str
    f: Callable[[Tensor, Tensor], Tensor]
    of_numpy: Callable[[float, Any], list[float]]
    start: Tensor
    end: float
    answer: Tensor


def problems(turns: float) -> list[Problem]:
    """Return both problems, for some turns of the planet."""
    start, end = torch.tensor([2.0, 0.0], dtype=torch.float64), 2 * math.pi * turns
    times = torch.tensor([0.0, end], dtype=torch.float64)
    answer = odeint_taylor(van_der_pol, start, times, order=30, rtol=1e-16, atol=1e-17)[-1]
    ellipse = on_the_ellipse(ECCENTRICITY, end)
    return [
        Problem("Kepler", kepler, kepler_of_numpy, at_perihelion(ECCENTRICITY), end, ellipse),
        Problem("Van der Pol", van_der_pol, van_der_pol_of_numpy, start, end, answer),
    ]


def errors_by_step(problem: Problem, order: int, counts: Sequence[int]) -> list[float]:
    """Return the final error after some numbers of equal steps, until rounding dominates."""
    times = torch.tensor([0.0, problem.end], dtype=torch.float64)
    found = []
    for count in counts:
        y = odeint_taylor(problem.f, problem.start, times, order=order, step_size=problem.end / count)[-1]
        found.append(float((y - problem.answer).abs().max()))
        if found[-1] < FLOOR:
            break
    return found


# Smaller errors are mostly rounding errors.
FLOOR = 1e-12


def slope(counts: Sequence[int], errors: Sequence[float]) -> float:
    """Estimate the exponent of the step in the error from the last two errors above rounding."""
    pairs = list(pairwise((count, error) for count, error in zip(counts, errors, strict=False) if error > FLOOR))
    (n, before), (m, after) = pairs[-1]
    return math.log(before / after) / math.log(m / n)


@dataclass(frozen=True)
class Effort:
    """Cost and error of one integration."""

    error: float
    evaluations: int
    seconds: float


def by_series(problem: Problem, tolerance: float) -> Effort:
    """Integrate by `hodiff.taylor.odeint_taylor`."""
    times = torch.tensor([0.0, problem.end], dtype=torch.float64)
    begun = time.perf_counter()
    found = odeint_taylor(problem.f, problem.start, times, rtol=tolerance, atol=tolerance, full_output=True)
    seconds = time.perf_counter() - begun
    return Effort(float((found.y[-1] - problem.answer).abs().max()), found.evaluations, seconds)


def by_scipy(problem: Problem, tolerance: float) -> Effort:
    """Integrate by `scipy.integrate.solve_ivp`."""
    begun = time.perf_counter()
    found = solve_ivp(
        problem.of_numpy, (0, problem.end), problem.start.numpy(), method="DOP853", rtol=tolerance, atol=tolerance
    )
    seconds = time.perf_counter() - begun
    return Effort(float(np.abs(found.y[:, -1] - problem.answer.numpy()).max()), found.nfev, seconds)


METHODS = {"series": by_series, "DOP853": by_scipy}


def many_at_once(count: int, tolerance: float) -> tuple[float, float, float]:
    """Return the seconds for many ellipses by both methods, and the largest error of the series."""
    eccentricities = torch.linspace(0.0, 0.5, count, dtype=torch.float64).tolist()
    starts = torch.stack([at_perihelion(e) for e in eccentricities])
    end = 2.0
    begun = time.perf_counter()
    found = odeint_taylor(kepler, starts, torch.tensor([0.0, end], dtype=torch.float64), rtol=tolerance, atol=tolerance)
    ours = time.perf_counter() - begun
    begun = time.perf_counter()
    for start in starts[:: max(count // 20, 1)].numpy():
        solve_ivp(kepler_of_numpy, (0, end), start, method="DOP853", rtol=tolerance, atol=tolerance)
    some = len(range(0, count, max(count // 20, 1)))
    theirs = (time.perf_counter() - begun) * count / some
    right = torch.stack([on_the_ellipse(e, end) for e in eccentricities])
    return ours, theirs, float((found[-1] - right).abs().max())


def check() -> str:
    """Run hodiff's check on a planet's squared distance as a function of its initial velocity: all routes, SciPy."""
    times = torch.tensor([0.0, 0.5], dtype=torch.float64)

    def distance(velocity: Tensor) -> Tensor:
        start = torch.cat([torch.tensor([1.0, 0.0], dtype=torch.float64), velocity])
        return odeint_taylor(kepler, start, times, order=6, step_size=0.5)[-1, :2].square().sum()

    return hodiff.assert_differentiable(distance, torch.tensor([0.1, 1.0], dtype=torch.float64), vmap=False).summary


def draw(
    counts: Sequence[int],
    fixed: dict[int, list[float]],
    adapted: dict[str, dict[str, list[Effort]]],
    problem: Problem,
    path: Path,
) -> None:
    """Plot errors by the size of fixed steps, and by evaluations with adaptive steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sizes = [problem.end / count for count in counts]
    for order, errors in fixed.items():
        (line,) = left.loglog(sizes[: len(errors)], errors, ".-", label=f"order {order}")
        guide = [errors[-1] * (size / sizes[len(errors) - 1]) ** order for size in sizes]
        left.loglog(sizes, guide, ":", color=line.get_color(), linewidth=0.8)
    left.set(title="Kepler, fixed steps; dots: power of the order", xlabel="step", ylabel="error", ylim=(1e-15, 1e3))
    left.legend()
    for color, (name, methods) in enumerate(adapted.items()):
        for style, (method, efforts) in zip(("-", "--"), methods.items(), strict=True):
            right.loglog(
                [each.evaluations for each in efforts],
                [each.error for each in efforts],
                f".{style}",
                color=f"C{color}",
                label=f"{name}, {method}",
            )
    right.set(title="adapted steps", xlabel="evaluations of the right-hand side", ylabel="error")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Integrate with fixed and with adaptive steps, print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description="Differential equations by Taylor series, and by SciPy's DOP853.")
    parser.add_argument(
        "--quick", action="store_true", help="use a part of a turn, and fewer orders and tolerances, without the check"
    )
    parser.add_argument("--output", type=Path, default=Path("figures/ode_taylor.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the states are small: more threads would only wait for each other
    found = problems(0.25 if options.quick else 1.0)
    orders, counts = (ORDERS[:3], (4, 8, 16)) if options.quick else (ORDERS, (8, 16, 32, 64, 128, 256, 512))
    tolerances = TOLERANCES[1::4] if options.quick else TOLERANCES

    fixed = {order: errors_by_step(found[0], order, counts) for order in orders}
    print(f"{found[0].name}, error at the end by fixed steps\n{'order':>7}{'slope':>8}", *(f"{n:>9}" for n in counts))
    for order, errors in fixed.items():
        print(f"{order:>7}{slope(counts, errors):>8.2f}", *(f"{error:>9.1e}" for error in errors))

    adapted: dict[str, dict[str, list[Effort]]] = {}
    print(f"\n{'':13}{'':>9}{'error':>21}{'evaluations':>20}{'seconds':>18}")
    print(f"{'':13}{'tolerance':>9}" + f"{'series':>12}{'DOP853':>9}" * 3)
    for problem in found:
        efforts = {name: [way(problem, tolerance) for tolerance in tolerances] for name, way in METHODS.items()}
        adapted[problem.name] = efforts
        for tolerance, ours, theirs in zip(tolerances, *efforts.values(), strict=True):
            print(
                f"{problem.name:13}{tolerance:>9.0e}{ours.error:>12.1e}{theirs.error:>9.1e}"
                f"{ours.evaluations:>12,}{theirs.evaluations:>9,}{ours.seconds:>12.3f}{theirs.seconds:>9.3f}"
            )
    count = 50 if options.quick else 1000
    ours, theirs, error = many_at_once(count, 1e-10)
    print(
        f"\n{count:,} ellipses to t = 2, tolerance 1e-10: {ours:.2f} s at once by series (error {error:.0e}), "
        f"{theirs:.2f} s one after another by SciPy"
    )
    draw(counts, fixed, adapted, found[0], options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
