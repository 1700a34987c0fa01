"""Hypergradients of as many hyperparameters as weights, by a Neumann series.

python papers/lorraine-2020/reproduce.py
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.memory import peak_bytes
from hodiff.meta import SGD, Adam, adapt, hypergradient
from papers.common import OURS, Claim, Reproduction, run, span, verdict

IMAGES = 50  # training images, as many for validation, as in the paper
TERMS = [1, 2, 5, 10, 20, 50, 200, 500, 2000, 5000]
FEW, MANY = 20, 200  # terms for learning the penalties


@dataclass(frozen=True)
class Problem:
    """Network on few digits, with one penalty per weight."""

    hidden: int
    training: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def size(self) -> int:
        """Number of weights, which is also the number of penalties."""
        return 65 * self.hidden + 11 * self.hidden - self.hidden + 10 if self.hidden else 650

    def logits(self, weights: Tensor, images: Tensor) -> Tensor:
        """Compute the logits of a tanh network with one hidden layer, or of a linear model, from a weight vector."""
        if not self.hidden:
            return images @ weights[:640].view(64, 10) + weights[640:]
        first, bias, second, last = weights.split([64 * self.hidden, self.hidden, 10 * self.hidden, 10])
        return torch.tanh(images @ first.view(64, -1) + bias) @ second.view(-1, 10) + last

    def inner(self, weights: Tensor, penalties: Tensor) -> Tensor:
        """Compute the training loss with exp(penalty) times every weight's square."""
        images, labels = self.training
        return F.cross_entropy(self.logits(weights, images), labels) + (penalties.exp() * weights.square()).sum() / 2

    def outer(self, weights: Tensor, penalties: Tensor) -> Tensor:
        """Compute the validation loss."""
        del penalties
        images, labels = self.validation
        return F.cross_entropy(self.logits(weights, images), labels)

    def accuracy(self, weights: Tensor, data: tuple[Tensor, Tensor]) -> float:
        """Return the share of images that are classified right."""
        return (self.logits(weights, data[0]).argmax(1) == data[1]).double().mean().item()

    def start(self) -> Tensor:
        """Return the initial weights."""
        generator = torch.Generator().manual_seed(0)
        return 0.1 * torch.randn(self.size, dtype=torch.float64, generator=generator)


def make(hidden: int) -> Problem:
    """Return the problem, with the digits in three parts."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, targets = torch.from_numpy(pixels / 16)[order], torch.from_numpy(labels)[order]
    parts = (slice(0, IMAGES), slice(IMAGES, 2 * IMAGES), slice(2 * IMAGES, None))
    return Problem(hidden, *((images[part], targets[part]) for part in parts))


def approximations(problem: Problem, terms: list[int]) -> dict[str, Any]:
    """Compare the series with the hypergradient by torch's Hessian and a dense solve, by number of terms."""
    penalties = torch.full((problem.size,), -4.0, dtype=torch.float64)
    objective: Callable[[Tensor], Tensor] = lambda w: problem.inner(w, penalties)  # noqa: E731
    minimum = hodiff.optimize.minimize(objective, problem.start(), method="trust-ncg", tol=1e-9).x
    H = torch.func.hessian(objective)(minimum)
    upper = torch.func.grad(lambda w: problem.outer(w, penalties))(minimum)
    exact = -penalties.exp() * minimum * torch.linalg.solve(H, upper)
    step = 1 / torch.linalg.eigvalsh(H)[-1].item()
    ways: dict[str, list[float]] = {"cosine": [], "distance": []}
    for count in terms:
        # One term replaces the inverse by a multiple of the identity, the T1-T2 method.
        found = series(problem, minimum, penalties, count, step).value
        ways["cosine"].append(F.cosine_similarity(found, exact, dim=0).item())
        ways["distance"].append(((found - exact).norm() / exact.norm()).item())
    return {"terms": terms, **ways}


def series(problem: Problem, weights: Tensor, penalties: Tensor, terms: int, step: float) -> Any:
    """Compute the hypergradient by a truncated series."""
    with warnings.catch_warnings():
        # The paper proposes a truncated series.
        warnings.simplefilter("ignore", hodiff.HodiffWarning)
        return hypergradient(
            problem.outer, problem.inner, weights, penalties, "neumann", iterations=terms, step=step, tolerance=1e-12
        )


def overfit(problem: Problem, rounds: int, inner_steps: int, terms: int, progress: bool) -> list[dict[str, float]]:
    """Alternate steps on the weights with one step on the penalties, to minimize the validation loss."""
    weights, penalties = problem.start(), torch.full((problem.size,), -4.0, dtype=torch.float64)
    optimizer = Adam(0.1)
    state, rate, found = optimizer.init(penalties), 0.3, []
    for step in tqdm(range(rounds), desc=f"{problem.size} penalties", leave=False, disable=not progress):
        with torch.no_grad():
            weights = adapt(lambda w, _, p=penalties: problem.inner(w, p), weights, None, SGD(rate), inner_steps)
        slope = series(problem, weights, penalties, terms, rate).value
        penalties, state = optimizer.update(slope, state, penalties)
        # Gradient steps and the series converge only while the largest exp(penalty) is below 2 / rate.
        penalties = penalties.clamp(-12, 1)
        if step % 10 == 9 or step == rounds - 1:
            found.append({
                "step": step + 1,
                "loss": problem.outer(weights, penalties).item(),
                "training": problem.accuracy(weights, problem.training),
                "validation": problem.accuracy(weights, problem.validation),
                "test": problem.accuracy(weights, problem.test),
            })
    return found


def overfit_exactly(problem: Problem, rounds: int) -> list[float]:
    """Return validation accuracies with weights at a minimum every time, and exact hypergradients by a dense solve."""
    weights, penalties = problem.start(), torch.full((problem.size,), -4.0, dtype=torch.float64)
    optimizer = Adam(0.1)
    state, found = optimizer.init(penalties), []
    for _ in range(rounds):
        weights = hodiff.optimize.minimize(problem.inner, weights, penalties, method="trust-exact", tol=1e-8).x
        H = hodiff.hessian_matrix(problem.inner, weights, penalties)
        upper = torch.func.grad(problem.outer)(weights, penalties)
        slope = -penalties.exp() * weights * torch.linalg.solve(H, upper)
        penalties, state = optimizer.update(slope, state, penalties)
        penalties = penalties.clamp(-12, 1)
        found.append(problem.accuracy(weights, problem.validation))
    return found


def enough(found: dict[str, Any]) -> str:
    """Return the fewest terms with a cosine above 0.99, or "more than" the largest number tried."""
    near = [f"{terms:,}" for terms, cosine in zip(found["terms"], found["cosine"], strict=True) if cosine > 0.99]
    return near[0] if near else f"more than {found['terms'][-1]:,}"


def costs(problem: Problem, steps: list[int]) -> dict[str, Any]:
    """Measure memory and time of a hypergradient by terms or unrolled steps, and of a training step."""
    weights, penalties = problem.start(), torch.full((problem.size,), -4.0, dtype=torch.float64)
    unit: Callable[[], Any] = lambda: torch.func.grad(problem.inner)(weights, penalties)  # noqa: E731
    ways: dict[str, Callable[[int], Any]] = {
        "series": lambda count: series(problem, weights, penalties, count, 0.3),
        "unrolled": lambda count: hypergradient(
            *(problem.outer, problem.inner, weights, penalties, "unroll"), steps=count, optimizer=SGD(0.3)
        ),
    }
    MiB = {name: [peak_bytes(lambda w=way, c=count: w(c)) / 2**20 for count in steps] for name, way in ways.items()}
    return {
        "steps": steps,
        "MiB": MiB,
        "gradients": {str(terms): seconds(lambda n=terms: ways["series"](n)) / seconds(unit) for terms in (FEW, MANY)},
        "MiB of a gradient": peak_bytes(unit) / 2**20,
    }


def seconds(call: Callable[[], Any]) -> float:
    """Return the least processor seconds of five calls."""
    found = []
    for _ in range(5):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def draw(near: dict[str, Any], curves: dict[str, list[dict[str, float]]], paid: dict[str, Any]) -> Figure:
    """Plot similarity by terms, accuracies while the penalties are learned, and memory."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, found in near.items():
        left.plot(found["terms"], found["cosine"], marker=".", label=name)
    left.set(xlabel="terms", ylabel="cosine similarity with the exact", xscale="log")
    left.legend(fontsize=7)
    for index, (name, found) in enumerate(curves.items()):
        for kind, style in (("validation", "-"), ("test", ":")):
            steps, values = ([each[key] for each in found] for key in ("step", kind))
            middle.plot(steps, values, style, color=f"C{index}", label=f"{name}, {kind}")
    middle.set(xlabel="steps on the penalties", ylabel="accuracy")
    middle.legend(fontsize=7)
    for name, values in paid["MiB"].items():
        right.loglog(paid["steps"], values, marker=".", label=name)
    right.set(xlabel="terms or unrolled steps", ylabel="MiB")
    right.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Compare the series with the exact hypergradient, then overfit the validation set."""
    torch.set_num_threads(1)
    rounds, inner_steps, hidden = (60, 10, 8) if quick else (300, 10, 32)
    problems = {"linear": make(0), f"one layer of {hidden}": make(hidden)}
    terms = TERMS[:6:2] if quick else TERMS
    near = {"linear": approximations(problems["linear"], terms)}
    if not quick:
        near["one layer of 8"] = approximations(make(8), terms)
    curves, longer = (
        {name: overfit(problem, steps, inner_steps, count, progress) for name, problem in problems.items()}
        for count, steps in ((FEW, rounds), (MANY, 10 if quick else rounds))
    )
    exactly = overfit_exactly(problems["linear"], 5 if quick else 50)
    paid = costs(problems[f"one layer of {hidden}"], [5, 20] if quick else [5, 10, 20, 50, 100])

    cosines = [found["cosine"] for found in near.values()]
    reached = [curve[-1]["validation"] for curve in curves.values()]
    losses = [curve[-1]["loss"] / curve[0]["loss"] for curve in curves.values()]
    gap = [curve[-1]["validation"] - curve[-1]["test"] for curve in curves.values()]
    grown = {name: values[-1] / values[0] for name, values in paid["MiB"].items()}
    work, more_work = paid["gradients"].values()
    claims = [
        Claim(
            "With a penalty for each weight, hypergradients overfit a validation set of 50 images",
            "validation accuracy of 100 %",
            f"{span([100 * each for each in reached])} % ({', '.join(f'{p.size:,}' for p in problems.values())} "
            f"penalties), {span([100 * each for each in gap])} points above the test accuracy",
            verdict(min(reached) == 1 and min(gap) > 0.03, min(reached) > 0.95 and max(losses) < 0.8),
        ),
        Claim(
            "More terms of the series approach the exact hypergradient",
            "qualitative",
            "; ".join(
                f"{name}: cosine {found['cosine'][0]:.3f} with {found['terms'][0]} term, "
                f"{found['cosine'][-1]:.4f} with {terms[-1]:,}, above 0.99 with {enough(found)}"
                for name, found in near.items()
            ),
            verdict(
                all(sorted(each) == each and each[-1] > 0.99 for each in cosines),
                all(each[-1] > each[0] for each in cosines),
            ),
        ),
        Claim(
            "Memory does not grow with the terms; memory of unrolling grows with its steps",
            "qualitative",
            f"{paid['steps'][0]} to {paid['steps'][-1]}: {grown['series']:.2f} times, unrolled {grown['unrolled']:.1f}",
            verdict(grown["series"] < 1.2 and grown["unrolled"] > 0.5 * paid["steps"][-1] / paid["steps"][0]),
        ),
        Claim(
            "A hypergradient costs a few training steps",
            "only a few times more costly in memory and compute than training",
            f"{FEW} terms: {work:.0f} gradients; one every {inner_steps} training steps: {1 + work / inner_steps:.1f} "
            f"times training; {paid['MiB']['series'][0] / paid['MiB of a gradient']:.1f} times the memory",
            verdict(1 + work / inner_steps < 10 and paid["MiB"]["series"][0] < 10 * paid["MiB of a gradient"]),
        ),
        Claim(
            "The distance from the exact hypergradient",
            "not quoted here",
            "; ".join(
                f"{name}: {found['distance'][terms.index(FEW)]:.2g} with {FEW}, {found['distance'][-1]:.0e} with "
                f"{terms[-1]:,} terms"
                for name, found in near.items()
            ),
            OURS,
        ),
        Claim(
            f"The validation set, overfitted by {MANY} terms",
            "not quoted here",
            "; ".join(f"{name}: {100 * curve[-1]['validation']:.1f} %" for name, curve in longer.items())
            + f"; {more_work:.0f} gradients each, {1 + more_work / inner_steps:.0f} times training",
            OURS,
        ),
        Claim(
            "The validation set, overfitted by exact hypergradients at exact minima",
            "not quoted here",
            f"linear: {100 * exactly[-1]:.1f} % after {exactly.index(exactly[-1]) + 1} steps",
            OURS,
        ),
    ]
    settings = {"images": IMAGES, "outer steps": rounds, "inner steps": inner_steps, "terms": FEW}
    data = {"approximations": near, "training": curves, "training with more terms": longer, "costs": paid}
    data["training, exactly"] = exactly
    return Reproduction(claims, settings, data, draw(near, curves, paid))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
