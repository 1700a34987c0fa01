"""Optimal control: swing up a pendulum with the least effort, by direct collocation with sparse derivatives.

    python examples/trajectory.py
    python examples/trajectory.py --knots 2000

The unknowns are angle, rate and torque at equally spaced times. The effort, the integral of the squared torque, is
minimised. Between neighbouring times the trapezoidal rule imposes the equation of motion, angle'' = torque - sin(angle)
- 0.1 angle'. The pendulum hangs at the first time and stands at the last. Each constraint has at most six unknowns, so
  the Jacobian of the constraints and the Hessian of the Lagrangian are banded. `hodiff.sparse.jacobian` and
  `hodiff.sparse.lagrangian_hessian` take a few products each, for any number of times.

Newton's method on the Karush-Kuhn-Tucker conditions solves

    [ H + shift  J^T ] [ step        ]     [ gradient of the effort ]
    [ J            0 ] [ multipliers ] = - [ constraints            ]

by SciPy's `splu`. Steps are halved until a merit function falls: effort plus a multiple of the violated constraints.
The shift grows if the step has no positive curvature. The optimal trajectory of eight seconds first swings back by 52
degrees.

The script compares a smaller problem with dense derivatives. It also simulates the pendulum with the torque by SciPy's
`solve_ivp`, which is independent of collocation: the pendulum should stand at the end.

Source: M. Kelly, An introduction to trajectory optimization, SIAM Review 59 (2017), section 3; J. Nocedal & S. Wright,
Numerical Optimization, 2nd ed. (2006), algorithm 18.3.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.sparse import block_array, csr_array, eye_array
from scipy.sparse.linalg import splu
from torch import Tensor

import hodiff

mpl.use("Agg")
import matplotlib.pyplot as plt

FRICTION = 0.1
SHIFTS = (0.0, *(10.0**k for k in range(-4, 4)))
TOLERANCE = 1e-8
HALVINGS = 20


@dataclass(frozen=True)
class SwingUp:
    """Swing-up problem with `knots` times in `duration` seconds; unknowns are (knots, 3): angle, rate, torque."""

    knots: int
    duration: float = 8.0

    @property
    def step(self) -> float:
        """Time between two knots."""
        return self.duration / (self.knots - 1)

    def effort(self, z: Tensor) -> Tensor:
        """Compute the integral of the squared torque, by the trapezoidal rule."""
        squares = z.view(-1, 3)[:, 2] ** 2
        return self.step * (squares.sum() - (squares[0] + squares[-1]) / 2)

    def constraints(self, z: Tensor) -> dict[str, Tensor]:
        """Compute the constraints, which should be zero: the ends, and the residuals of the equation of motion."""
        z = z.view(-1, 3)
        states, rates = z[:, :2], motion(z)
        missed = states[1:] - states[:-1] - self.step / 2 * (rates[1:] + rates[:-1])
        stands = states.new_tensor([math.pi, 0.0])
        return {"first": states[0], "last": states[-1] - stands, "between": missed}

    def start(self) -> Tensor:
        """Return a swing back and then up, without torque, which does not satisfy the equation of motion."""
        z, t = torch.zeros(self.knots, 3, dtype=torch.float64), torch.linspace(0, 1, self.knots, dtype=torch.float64)
        z[:, 0] = math.pi * t - torch.sin(2 * math.pi * t) * (1 - t)
        z[:, 1] = torch.gradient(z[:, 0], spacing=self.step)[0]
        return z.view(-1)


def motion(z: Tensor) -> Tensor:
    """Compute the time derivatives of angle and rate, (..., 2), of unknowns (..., 3)."""
    angle, rate, torque = z.unbind(-1)
    return torch.stack([rate, torque - torch.sin(angle) - FRICTION * rate], -1)


def flat(parts: dict[str, Tensor]) -> Tensor:
    """Return the constraints in one vector, in the order of their names in the dict."""
    return torch.cat([each.reshape(-1) for each in parts.values()])


def unflat(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into a dict like the constraints."""
    parts = vector.split([each.numel() for each in like.values()])
    return {name: part.view_as(each) for part, (name, each) in zip(parts, like.items(), strict=True)}


@dataclass(frozen=True)
class Iteration:
    """Record of one point of Newton's method."""

    effort: float
    broken: float
    slope: float
    step: float
    shift: float


@dataclass(frozen=True)
class Derivatives:
    """Jacobian of the constraints and Hessian of the Lagrangian of a problem, as SciPy matrices."""

    jacobian: Callable[[Tensor], csr_array]
    hessian: Callable[[Tensor, dict[str, Tensor]], csr_array]


def sparse(problem: SwingUp) -> Derivatives:
    """Return sparse derivatives, whose patterns are found and colored at the first call."""
    return Derivatives(
        hodiff.sparse.jacobian(problem.constraints, format="scipy"),
        hodiff.sparse.lagrangian_hessian(problem.effort, problem.constraints, format="scipy"),
    )


def dense(problem: SwingUp) -> Derivatives:
    """Return dense derivatives, with zeros."""

    def jacobian(z: Tensor) -> csr_array:
        return csr_array(hodiff.jacobian(lambda z: flat(problem.constraints(z)))(z).numpy())

    def hessian(z: Tensor, multipliers: dict[str, Tensor]) -> csr_array:
        def lagrangian(z: Tensor) -> Tensor:
            return problem.effort(z) + flat(multipliers) @ flat(problem.constraints(z))

        return csr_array(hodiff.hessian_matrix(lagrangian, z).numpy())

    return Derivatives(jacobian, hessian)


def gradient(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Compute the gradient of a scalar function."""
    z = z.detach().requires_grad_()
    return torch.autograd.grad(f(z), z)[0]


def newton(problem: SwingUp, derivatives: Derivatives, most: int = 100) -> tuple[Tensor, list[Iteration]]:
    """Minimize the effort under the constraints; return the unknowns and the iterations."""
    z, step, shift, seen = problem.start(), 0.0, 0.0, []
    multipliers, penalty = torch.zeros_like(flat(problem.constraints(z))), 0.0

    def merit(z: Tensor) -> float:
        return (problem.effort(z) + penalty * flat(problem.constraints(z)).abs().sum()).item()

    for _ in range(most):
        named = problem.constraints(z)
        broken, slopes = flat(named), gradient(problem.effort, z)
        J = derivatives.jacobian(z)
        slope = abs(slopes.numpy() + J.T @ multipliers.numpy()).max()
        seen.append(Iteration(problem.effort(z).item(), broken.abs().max().item(), slope, step, shift))
        if max(seen[-1].broken, slope) <= TOLERANCE:
            return z, seen
        H = derivatives.hessian(z, unflat(multipliers, named))
        direction, proposed, shift = kkt_step(H, J, slopes, broken)
        penalty = max(penalty, 1.1 * proposed.abs().max().item())
        before, descent = merit(z), (slopes @ direction - penalty * broken.abs().sum()).item()
        step = 1.0
        for _ in range(HALVINGS):
            # Near the minimum the merit falls by less than rounding errors.
            if merit(z + step * direction) <= before + 1e-4 * step * descent + 1e-13 * abs(before):
                break
            step /= 2
        z, multipliers = z + step * direction, multipliers + step * (proposed - multipliers)
    raise hodiff.ConvergenceError(f"trajectory: slope {seen[-1].slope:.1e} after {most} steps.")


def kkt_step(H: csr_array, J: csr_array, slopes: Tensor, broken: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return a direction of positive curvature, its multipliers, and the shift that it needed."""
    right = -np.concatenate([slopes.numpy(), broken.numpy()])
    for shift in SHIFTS:
        shifted = H + shift * eye_array(H.shape[0])
        found = splu(block_array([[shifted, J.T], [J, None]]).tocsc()).solve(right)
        direction = found[: H.shape[0]]
        if direction @ (shifted @ direction) > 0:
            break
    return torch.from_numpy(direction), torch.from_numpy(found[H.shape[0] :]), shift


def simulated(problem: SwingUp, z: Tensor) -> np.ndarray:
    """Simulate by SciPy with linearly interpolated torques; return the final angle and rate."""
    times, torques = np.linspace(0, problem.duration, problem.knots), z.view(-1, 3)[:, 2].numpy()

    def rates(t: float, state: Any) -> list[float]:
        torque = np.interp(t, times, torques)
        return [state[1], torque - math.sin(state[0]) - FRICTION * state[1]]

    found = solve_ivp(rates, (0, problem.duration), [0.0, 0.0], rtol=1e-9, atol=1e-11, max_step=10 * problem.step)
    return found.y[:, -1]


def compare(knots: int) -> tuple[float, dict[str, float]]:
    """Return the relative distance of sparse derivatives from dense ones, and the seconds of both."""
    problem = SwingUp(knots)
    z = problem.start() + 0.1 * torch.sin(torch.arange(3.0 * knots, dtype=torch.float64))
    multipliers = {name: torch.cos(each) for name, each in problem.constraints(z).items()}
    seconds, matrices = {}, []
    for name, ways in (("sparse", sparse(problem)), ("dense", dense(problem))):
        ways.jacobian(z), ways.hessian(z, multipliers)
        begun = time.process_time()
        matrices.append((ways.jacobian(z), ways.hessian(z, multipliers)))
        seconds[name] = time.process_time() - begun
    off = max(abs(one - other).max() / abs(other).max() for one, other in zip(*matrices, strict=True))
    return float(off), seconds


def check() -> str:
    """Run hodiff's check on effort and squared constraints: all routes, gradgradcheck, SciPy's Hessian."""
    problem = SwingUp(4)

    def together(z: Tensor) -> Tensor:
        return problem.effort(z) + flat(problem.constraints(z)).square().sum()

    z = problem.start() + 0.1 * torch.sin(torch.arange(12, dtype=torch.float64))
    return hodiff.assert_differentiable(together, z, vmap=False).summary


def draw(problem: SwingUp, z: Tensor, kkt: csr_array, path: Path) -> None:
    """Draw the pendulum's motion, its torque, and the pattern of a step's matrix."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    angle, rate, torque = z.view(-1, 3).T.numpy()
    times = np.linspace(0, problem.duration, problem.knots)
    for t in range(0, problem.knots, max(problem.knots // 40, 1)):
        shade = 0.15 + 0.85 * t / problem.knots
        left.plot([0, math.sin(angle[t])], [0, -math.cos(angle[t])], "o-", color="C0", alpha=shade, markersize=4)
    left.set(title="the pendulum, later ones darker", aspect="equal")
    for values, name in ((angle, "angle"), (rate, "rate"), (torque, "torque")):
        middle.plot(times, values, label=name)
    middle.axhline(math.pi, color="gray", linewidth=0.8, linestyle=":")
    middle.set(xlabel="time")
    middle.legend()
    right.spy(kkt, markersize=0.4)
    right.set(title=f"matrix of a step, {kkt.nnz / kkt.shape[0] ** 2:.2%} of its entries", xticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Swing up, and compare with a simulation."""
    parser = argparse.ArgumentParser(description="A pendulum's swing-up by sparse Newton steps.")
    parser.add_argument("--knots", type=int, default=600, help="number of times")
    parser.add_argument("--quick", action="store_true", help="use 80 times")
    parser.add_argument("--output", type=Path, default=Path("figures/trajectory.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    problem = SwingUp(80 if options.quick else options.knots)
    off, seconds = compare(min(problem.knots, 150))
    times = ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in seconds.items())
    print(f"{min(problem.knots, 150)} times: sparse and dense derivatives differ by {off:.0e}; {times}")
    begun, ways = time.process_time(), sparse(problem)
    z, seen = newton(problem, ways)
    print(f"{problem.knots} times, {len(z):,} unknowns: {time.process_time() - begun:.2f} s\n")
    print(f"{'iteration':>9}{'effort':>16}{'broken':>10}{'slope':>10}{'step':>8}{'shift':>8}")
    for i, each in enumerate(seen):
        print(f"{i:9}{each.effort:16.10f}{each.broken:10.1e}{each.slope:10.1e}{each.step:8.3g}{each.shift:8.3g}")
    angle, rate = simulated(problem, z)
    print(f"\nsimulated with this torque: {angle - math.pi:+.1e} from upright, rate {rate:+.1e}")
    zero = {name: torch.zeros_like(each) for name, each in problem.constraints(z).items()}
    J = ways.jacobian(z)
    draw(problem, z, block_array([[ways.hessian(z, zero), J.T], [J, None]]), options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
