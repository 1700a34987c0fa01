"""Influence through training: predictions against retraining without some of the training images.

python papers/ilyas-2025-magic/reproduce.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.influence_compared import WAYS, Training, left_out, parse_options, prepare, score, train_again
from papers.common import OURS, Claim, Reproduction, run, verdict

PARTS = (0.01, 0.02, 0.05, 0.1, 0.3)  # shares of the training images that are left out
MAGIC, EKFAC = "through training", "EK-FAC"


def make(quick: bool) -> tuple[Training, argparse.Namespace]:
    """Return the training run of examples/influence_compared.py."""
    options = parse_options(["--quick"] if quick else ["--trainings", "40"])
    if quick:
        options.epochs, options.trainings = 20, 12
    return prepare(options), options


def seconds(call: Any) -> float:
    """Return the least processor seconds of three calls."""
    found = []
    for _ in range(3):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def costs(training: Training) -> dict[str, float]:
    """Measure processor seconds of training, and of one held-out image's influences, training included."""

    def train() -> Tensor:
        with torch.no_grad():
            return training.held_out_losses(training.ones)[0]

    def influence() -> Tensor:
        weights = training.ones.clone().requires_grad_()
        return torch.autograd.grad(training.held_out_losses(weights)[0], weights)[0]

    return {"training": seconds(train), "influence": seconds(influence)}


def against_differences(training: Training, influence: Tensor) -> float:
    """Return the relative distance of one image's influences from central differences in its weight."""
    step = 1e-4 * torch.zeros_like(training.ones).index_fill(0, torch.tensor([0]), 1.0)
    with torch.no_grad():
        ends = [training.held_out_losses(training.ones + sign * step) for sign in (1, -1)]
    slopes = (ends[0] - ends[1]) / 2e-4
    return ((influence[0] - slopes).norm() / slopes.norm()).item()


def draw(parts: list[float], scores: dict[str, list[float]], predicted: Tensor, actual: Tensor) -> Figure:
    """Plot scores by the part that is left out, and predicted against actual changes."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in scores.items():
        left.semilogx(parts, values, marker=".", label=name)
    left.set(xlabel="part left out", ylabel="linear datamodelling score", ylim=(0, 1.02))
    left.legend(fontsize=7)
    right.plot(predicted.flatten(), actual.flatten(), ".", markersize=2)
    right.axline((0, 0), slope=1, color="gray", linewidth=0.8)
    right.set(xlabel="predicted change of a loss, 2 % left out", ylabel="trained again")
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Predict by all ways, train again without parts of the images, and compare ranks."""
    torch.set_num_threads(1)
    training, options = make(quick)
    predicted = {name: way(training) for name, way in WAYS.items()}
    generator = torch.Generator().manual_seed(0)
    parts = list(PARTS[1::2] if quick else PARTS)
    scores: dict[str, list[float]] = {name: [] for name in WAYS}
    shown: tuple[Tensor, Tensor] | None = None
    for part in tqdm(parts, desc="training again", leave=False, disable=not progress):
        weights = left_out(options.images, part, options.trainings, generator)
        actual = train_again(training, weights)
        for name, influence in predicted.items():
            scores[name].append(score((weights - 1) @ influence, actual))
        if shown is None or part == 0.02:
            shown = (weights - 1) @ predicted[MAGIC], actual
    assert shown is not None
    slope = float((shown[0] * shown[1]).sum() / shown[0].square().sum())
    paid = costs(training)
    times = paid["influence"] / paid["training"]
    distance = against_differences(training, predicted[MAGIC])
    best = {name: max(values) for name, values in scores.items()}
    few = [index for index, part in enumerate(parts) if part <= 0.05]
    low = min(scores[MAGIC][index] for index in few)
    weak = float(np.mean([scores[EKFAC][i] for i in few]))
    ahead = min(scores[MAGIC][i] - scores[name][i] for i in few for name in WAYS if name != MAGIC)
    claims = [
        Claim(
            "The predictions are nearly perfect if few images are left out",
            "qualitative (score near 1 for small parts)",
            f"score {low:.3f} and more with up to 5 % left out; changes are {slope:.2f} times the predicted ones",
            verdict(low > 0.95 and abs(slope - 1) < 0.1, low > 0.8),
        ),
        Claim(
            "The predictions get worse with the fraction that is left out",
            "qualitative",
            ", ".join(f"{value:.3f} at {part:.0%}" for part, value in zip(parts, scores[MAGIC], strict=True)),
            verdict(scores[MAGIC][-1] < scores[MAGIC][0] - 0.005, scores[MAGIC][-1] < scores[MAGIC][0]),
        ),
        Claim(
            "EK-FAC correlates only weakly with the actual changes",
            "qualitative",
            f"score {weak:.2f} on average with up to 5 % left out, {best[EKFAC]:.2f} at best",
            verdict(best[EKFAC] < 0.5, weak < low - 0.2),
        ),
        Claim(
            "The influences on one prediction cost two to three trainings",
            "2 to 3 times the cost of training",
            f"{times:.1f} times",
            verdict(times < 3.5, times < 6),
        ),
        Claim(
            "Exact Hessian and Gauss-Newton influence functions",
            "not in the paper",
            f"scores up to {best['Hessian']:.2f} and {best['Gauss-Newton']:.2f}; at least {ahead:.2f} behind where few "
            f"are left out; differences confirm the influences to {distance:.0e}",
            OURS,
        ),
    ]
    settings = {
        **{"images": options.images, "hidden": options.hidden, "steps": len(training.batches)},
        **{"held out": options.held_out, "trainings": options.trainings},
    }
    data = {"parts": parts, "scores": scores, "costs": paid, "slope": slope, "against differences": distance}
    return Reproduction(claims, settings, data, draw(parts, scores, *shown))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
