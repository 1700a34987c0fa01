"""Hypergradients: their convergence with the inner steps, and the losses that a public benchmark prints.

python papers/grazzi-2020-hypergradients/reproduce.py
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from examples.ridge_hyperparameters import STEP_SIZE, Data, learn, make_data, make_losses, regression_loss
from hodiff.meta import SGD, Hypergradient, adapt, hypergradient
from papers.common import OURS, Claim, Reproduction, run, span, verdict

# Losses that the notebook examples/logistic_regression of the library hypertorch prints, by outer step.
PRINTED = {100: 0.28535441, 990: 0.28050649}
PRINTED_AGREES_TO = 1e-6  # absolute: some digits of float32
DATA_SEED = 1  # the seed of the notebook
ITD, FIXED_POINT, CG = "iterative", "implicit, fixed point", "implicit, CG"


class RidgeProblem:
    """Ridge penalties of a logistic regression with a validation loss, in float64."""

    def __init__(self, seed: int):
        self.training, self.validation = ((points.double(), labels.double()) for points, labels in make_data(seed))
        features = self.training[0].shape[1]
        self.start = torch.zeros(features, dtype=torch.float64)
        self.penalties = torch.ones(features, dtype=torch.float64)

    def inner(self, weights: Tensor, penalties: Tensor) -> Tensor:
        """Compute the penalised training loss."""
        return regression_loss(weights, self.training) + (penalties * weights.square()).sum() / 2

    def outer(self, weights: Tensor, penalties: Tensor) -> Tensor:
        """Compute the validation loss."""
        del penalties
        return regression_loss(weights, self.validation)

    def descended(self, steps: int) -> Tensor:
        """Return the weights after some steps of gradient descent."""
        with torch.no_grad():
            return adapt(lambda w, _: self.inner(w, self.penalties), self.start, None, SGD(STEP_SIZE), steps)

    def exact(self) -> tuple[Tensor, np.ndarray]:
        """Return the hypergradient at the minimum and the inner Hessian's eigenvalues, by NumPy and SciPy alone."""
        penalties = self.penalties.numpy()
        points, labels = (each.numpy() for each in self.training)

        def slope(weights: np.ndarray, points: np.ndarray, labels: np.ndarray) -> np.ndarray:
            return points.T @ (sigmoid(points @ weights) - labels) / len(points)

        def hessian(weights: np.ndarray) -> np.ndarray:
            probabilities = sigmoid(points @ weights)
            return points.T * (probabilities * (1 - probabilities)) @ points / len(points) + np.diag(penalties)

        found = minimize(
            lambda w: np.logaddexp(0, -(2 * labels - 1) * (points @ w)).mean() + penalties @ w**2 / 2,
            self.start.numpy(),
            jac=lambda w: slope(w, points, labels) + penalties * w,
            hess=hessian,
            method="trust-exact",
            options={"gtol": 1e-13},
        )
        upper = slope(found.x, *(each.numpy() for each in self.validation))
        curvature = hessian(found.x)
        return torch.from_numpy(-found.x * np.linalg.solve(curvature, upper)), np.linalg.eigvalsh(curvature)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Compute the logistic function."""
    return 1 / (1 + np.exp(-x))


def ways(problem: RidgeProblem) -> dict[str, Callable[[int], Hypergradient]]:
    """Return the paper's methods; their second loop takes as many steps as the inner loop."""

    def implicit(method: str, steps: int) -> Hypergradient:
        return hypergradient(
            *(problem.outer, problem.inner, problem.descended(steps), problem.penalties, method),
            iterations=steps,
            tolerance=1e-14,
            step=STEP_SIZE,
        )

    return {
        ITD: lambda steps: hypergradient(
            *(problem.outer, problem.inner, problem.start, problem.penalties, "unroll"),
            steps=steps,
            optimizer=SGD(STEP_SIZE),
        ),
        FIXED_POINT: lambda steps: implicit("neumann", steps),
        CG: lambda steps: implicit("implicit-cg", steps),
    }


def convergence(problem: RidgeProblem, exact: Tensor, steps: list[int], progress: bool) -> dict[str, list[float]]:
    """Return relative errors by method and number of steps."""
    methods = ways(problem)
    errors: dict[str, list[float]] = {name: [] for name in methods}
    work = [(name, count) for name in methods for count in steps]
    for name, count in tqdm(work, desc="hypergradients", leave=False, disable=not progress):
        with warnings.catch_warnings():
            # Errors of too few steps are measured on purpose.
            warnings.simplefilter("ignore", hodiff.HodiffWarning)
            found = methods[name](count).value
        errors[name].append(((found - exact).norm() / exact.norm()).item())
    return errors


def rate(steps: list[int], errors: list[float]) -> float:
    """Fit the factor by which the error shrinks per step, over the second half of the steps."""
    half = len(steps) // 2
    return float(np.exp(np.polyfit(steps[half:], np.log(errors[half:]), 1)[0]))


def draw(steps: list[int], errors: dict[str, list[float]], losses: list[float]) -> Figure:
    """Plot errors by inner steps, and the validation loss by outer steps."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, curve), style in zip(errors.items(), ("-", "--", "-."), strict=True):
        left.semilogy(steps, curve, style, label=name)
    left.set(xlabel="inner steps", ylabel="relative error of the hypergradient")
    left.legend(fontsize=7)
    right.plot(losses, linewidth=1)
    for step, value in PRINTED.items():
        if step < len(losses):
            right.plot(step, value, "kx")
    right.set(xlabel="outer steps", ylabel="validation loss, printed ones as crosses", ylim=(0.27, 0.35))
    return figure


def learned(data: tuple[Data, Data], outer_steps: int, progress: bool) -> list[float]:
    """Return validation losses by the notebook's method: backward through the last ten inner steps, in float32."""
    return learn(make_losses(*data)["last"], outer_steps, progress)[0]


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure convergence at the first penalties, then learn the penalties."""
    torch.set_num_threads(1)
    outer_steps, spacing = (101, 25) if quick else (991, 5)
    steps = list(range(5, 181, spacing))
    problem = RidgeProblem(DATA_SEED)
    exact, eigenvalues = problem.exact()
    errors = convergence(problem, exact, steps, progress)
    losses = learned(make_data(DATA_SEED), outer_steps, progress)

    shown = {step: value for step, value in PRINTED.items() if step < outer_steps}
    far = max(abs(losses[step] - value) for step, value in shown.items())
    rates = {name: rate(steps, curve) for name, curve in errors.items()}
    contraction = float(max(abs(1 - STEP_SIZE * eigenvalues)))
    others = [min(errors[ITD][i], errors[FIXED_POINT][i]) / errors[CG][i] for i in range(len(steps))]
    best = sum(gain >= 1 for gain in others) / len(others)
    worse = [a / b for a, b in zip(errors[ITD], errors[FIXED_POINT], strict=True)]
    claims = [
        Claim(
            "The library's notebook: validation loss after learning 20 ridge penalties",
            ", ".join(f"{value:.8f} at outer step {step}" for step, value in shown.items()),
            ", ".join(f"{losses[step]:.8f}" for step in shown) + f"; at most {far:.0e} apart",
            verdict(far <= PRINTED_AGREES_TO, far <= 1e-4),
        ),
        Claim(
            "Iterative and implicit differentiation converge linearly if the inner step is a contraction",
            f"in theory {contraction:.3f} a step here, times at most a polynomial",
            ", ".join(f"{name}: {value:.3f} a step" for name, value in rates.items())
            + f"; after {steps[-1]} steps at most {max(curve[-1] for curve in errors.values()):.0e}",
            verdict(all(abs(value - contraction) < 0.02 for value in rates.values()), max(rates.values()) < 1),
        ),
        Claim(
            "Implicit differentiation by conjugate gradients performs best",
            "qualitative (abstract)",
            f"best at {100 * best:.0f} % of the numbers of steps, by {span(others)} times",
            verdict(best == 1, best > 0.5),
        ),
        Claim(
            "Iterative differentiation compared with implicit by fixed-point iteration, with equal numbers of steps",
            "not quoted here",
            f"the iterative error is {span(worse, 2)} times the other",
            OURS,
        ),
    ]
    settings = {
        "points": "500 + 500 of 20 features",
        "inner step": STEP_SIZE,
        "outer steps": outer_steps,
        "penalties where errors are measured": 1.0,
        "seed": DATA_SEED,
    }
    data = {"steps": steps, "errors": errors, "rates": rates, "contraction": contraction, "losses": losses[::10]}
    return Reproduction(claims, settings, data, draw(steps, errors, losses))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
