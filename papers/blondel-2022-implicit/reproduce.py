"""Implicit differentiation at inexact solutions: the Jacobian's error against the solver's error.

python papers/blondel-2022-implicit/reproduce.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hodiff.functions import project_simplex
from hodiff.implicit import argmin, projected_argmin
from hodiff.meta import SGD, adapt
from papers.common import OURS, Claim, Reproduction, run, span, verdict

PENALTY = 0.1  # the penalty of every coefficient, at which the Jacobian is computed
CLASSES, TRAINING, VALIDATION = 5, 60, 30  # sizes of the support vector machine
# The penalty of its weights. It is so large that dual variables reach their bounds: otherwise the weights do not
# depend on the penalty.
SVM_PENALTY = 3.0
IMPLICIT, UNROLLED = "implicit", "unrolled"


class Ridge:
    """Ridge regression on the diabetes data, with one penalty per coefficient."""

    def __init__(self) -> None:
        X, y = load_diabetes(return_X_y=True)
        self.X, self.y = torch.from_numpy(X), torch.from_numpy((y - y.mean()) / y.std())
        self.penalties = torch.full((X.shape[1],), PENALTY, dtype=torch.float64)
        self.start = torch.zeros_like(self.penalties)
        # The minimum, its Jacobian, and the ends of the Hessian's spectrum, by NumPy alone.
        A = X.T @ X + np.diag(self.penalties.numpy())
        solution = np.linalg.solve(A, X.T @ self.y.numpy())
        self.solution = torch.from_numpy(solution)
        self.jacobian = torch.from_numpy(-np.linalg.solve(A, np.diag(solution)))
        spectrum = np.linalg.eigvalsh(A)
        self.least, self.step = float(spectrum[0]), float(1 / spectrum[-1])

    def objective(self, x: Tensor, penalties: Tensor) -> Tensor:
        """Compute half the squared residual and the penalties."""
        return (self.X @ x - self.y).square().sum() / 2 + (penalties * x.square()).sum() / 2

    def descended(self, steps: int, penalties: Tensor) -> Tensor:
        """Run gradient descent whose steps can be differentiated through."""
        inner: Callable[..., Tensor] = lambda x, _: self.objective(x, penalties)  # noqa: E731
        found: Tensor = adapt(inner, self.start, None, SGD(self.step), steps)
        return found

    def jacobians(self, steps: int) -> dict[str, Tensor]:
        """Compute the solution's Jacobian in the penalties after some solver steps, by both ways."""

        def solver(_: Any, __: Tensor, penalties: Tensor) -> Tensor:
            with torch.no_grad():
                return self.descended(steps, penalties)

        implicit = argmin(self.objective, solver, check=False)
        ways = {IMPLICIT: lambda p: implicit(self.start, p), UNROLLED: lambda p: self.descended(steps, p)}
        return {name: torch.func.jacrev(way)(self.penalties) for name, way in ways.items()}


class SupportVectors:
    """Dual of a multiclass support vector machine, and the validation error as a function of its penalty."""

    def __init__(self, features: int) -> None:
        generator = torch.Generator().manual_seed(0)
        count = TRAINING + VALIDATION
        points = torch.randn(count, features, dtype=torch.float64, generator=generator) / features**0.5
        truth = torch.randn(features, CLASSES, dtype=torch.float64, generator=generator)
        targets = torch.nn.functional.one_hot((points @ truth).argmax(1), CLASSES).double()
        self.X, self.X_val = points[:TRAINING], points[TRAINING:]
        self.Y, self.Y_val = targets[:TRAINING], targets[TRAINING:]
        self.start = torch.full_like(self.Y, 1 / CLASSES)
        self.step = 1 / torch.linalg.matrix_norm(self.X, 2).item() ** 2

    def weights(self, x: Tensor, penalty: Tensor) -> Tensor:
        """Return the primal weights of dual variables (training, classes)."""
        return self.X.T @ (self.Y - x) / penalty

    def objective(self, x: Tensor, penalty: Tensor) -> Tensor:
        """Compute the dual objective, which is minimized over one simplex per point."""
        return penalty * self.weights(x, penalty).square().sum() / 2 + (x * self.Y).sum()

    def solve(self, steps: int, penalty: Tensor) -> Tensor:
        """Run projected gradient descent whose steps can be differentiated through."""
        x, step = self.start, self.step * penalty
        for _ in range(steps):
            x = project_simplex(x - step * (self.Y - self.X @ self.weights(x, penalty)))
        return x

    def hypergradients(self, steps: int) -> dict[str, Callable[[], Tensor]]:
        """Return functions that compute the validation error's derivative in the penalty, by both ways."""

        def solver(_: Any, __: Tensor, penalty: Tensor) -> Tensor:
            with torch.no_grad():
                return self.solve(steps, penalty)

        dual = projected_argmin(
            # A loose tolerance: the race fixes the number of steps, and the difference of the derivatives is measured.
            *(self.objective, lambda x, _: project_simplex(x), solver),
            step_size=self.step,
            residual_tol=1e-3,
        )
        ways = {IMPLICIT: lambda p: dual(self.start, p), UNROLLED: lambda p: self.solve(steps, p)}

        def slope(way: Callable[[Tensor], Tensor]) -> Tensor:
            penalty = torch.tensor(SVM_PENALTY, dtype=torch.float64, requires_grad=True)
            error = (self.X_val @ self.weights(way(penalty), penalty) - self.Y_val).square().sum() / 2
            return torch.autograd.grad(error, penalty)[0]

        return {name: lambda way=way: slope(way) for name, way in ways.items()}


def race(features: int, steps: int, rounds: int) -> dict[str, Any]:
    """Race both hypergradients: return median processor seconds and the relative difference of their values."""
    ways = SupportVectors(features).hypergradients(steps)
    values = {name: way() for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    apart = (values[IMPLICIT] / values[UNROLLED] - 1).abs().item()
    return {"features": features, "apart": apart, **{name: float(np.median(each)) for name, each in seconds.items()}}


def draw(ridge: Ridge, iterates: list[float], errors: dict[str, list[float]], times: list[dict[str, Any]]) -> Figure:
    """Plot the errors of both Jacobians by the iterate's error, with the bound, and the time of hypergradients."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, curve in errors.items():
        left.loglog(iterates, curve, marker=".", label=name)
    left.loglog(iterates, [error / ridge.least for error in iterates], "k:", label="bound")
    left.set(xlabel="error of the solver", ylabel="error of the Jacobian")
    left.legend(fontsize=7)
    for name in errors:
        right.plot([each["features"] for each in times], [each[name] for each in times], marker=".", label=name)
    right.set(xlabel="features", ylabel="processor seconds a hypergradient", ylim=(0, None))
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure both errors after increasing numbers of steps, then time a larger problem."""
    torch.set_num_threads(1)
    ridge = Ridge()
    counts = [5, 20, 60, 150] if quick else [1, 2, 3, 5, 8, 12, 18, 25, 35, 50, 70, 100, 150, 200, 300, 400]
    iterates: list[float] = []
    errors: dict[str, list[float]] = {IMPLICIT: [], UNROLLED: []}
    for steps in tqdm(counts, desc="Jacobians", leave=False, disable=not progress):
        iterates.append((ridge.descended(steps, ridge.penalties) - ridge.solution).norm().item())
        for name, J in ridge.jacobians(steps).items():
            errors[name].append(torch.linalg.matrix_norm(J - ridge.jacobian, 2).item())
    sizes, inner, rounds = ([50, 200], 200, 1) if quick else ([100, 300, 1000], 300, 3)
    times = [race(features, inner, rounds) for features in tqdm(sizes, desc="times", leave=False, disable=not progress)]

    # Iterates with a tenth of the first error or less: before that, neither Jacobian is meaningful.
    near = [index for index, error in enumerate(iterates) if error < 0.1 * ridge.solution.norm()]
    bound = [error * ridge.least / iterate for error, iterate in zip(errors[IMPLICIT], iterates, strict=True)]
    logs = [np.log([curve[index] for index in near]) for curve in (iterates, errors[IMPLICIT])]
    slope = float(np.polyfit(*logs, 1)[0])
    worse = [errors[UNROLLED][index] / errors[IMPLICIT][index] for index in near]
    faster = [each[UNROLLED] / each[IMPLICIT] for each in times]
    claims = [
        Claim(
            "The error of the implicit Jacobian follows a bound that is linear in the solver's error",
            "qualitative (theorem 1 and its figure)",
            f"{span(bound, 2)} times the bound, as power {slope:.2f} of the solver's error",
            verdict(max(bound) <= 1.001 and min(bound) > 0.1 and abs(slope - 1) < 0.05, max(bound) <= 1.001),
        ),
        Claim(
            "Unrolling has a much larger error at the same iterate",
            "qualitative",
            f"{span(worse)} times that of implicit differentiation, from a tenth of the first error on",
            verdict(min(worse) > 3, min(worse) > 1),
        ),
        Claim(
            "The implicit hypergradient of a multiclass support vector machine is faster than unrolling",
            "qualitative, on CPU",
            f"{span(faster)} times as fast, {inner} inner steps, {sizes[0]} to {sizes[-1]} features",
            verdict(min(faster) > 1.2, max(faster) > 1.2),
        ),
        Claim(
            "Both hypergradients agree",
            "not in the paper",
            f"at most {max(each['apart'] for each in times):.0e} apart, relative",
            OURS,
        ),
    ]
    settings = {"data": "diabetes, 442 of 10 features", "penalty": PENALTY, "inner steps": inner, "sizes": sizes}
    data = {"steps": counts, "iterates": iterates, "errors": errors, "over the bound": bound, "times": times}
    return Reproduction(claims, settings, data, draw(ridge, iterates, errors, times))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
