"""AdaHessian and Adam: their accuracy, their range of learning rates, and the cost of a step.

python papers/yao-2021-adahessian/reproduce.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from papers.common import OURS, Claim, Reproduction, run, span, verdict
from papers.networks import digit_images, residual_network

ADAM, ADAHESSIAN = "Adam", "AdaHessian"
RATES = {ADAM: [3e-3, 1e-2, 3e-2, 1e-1, 3e-1], ADAHESSIAN: [3e-2, 1e-1, 3e-1, 1.0, 3.0]}
MAKERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    ADAM: lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    ADAHESSIAN: lambda parameters, rate: hodiff.optim.AdaHessian(parameters, lr=rate),
}
WITHIN = 0.03  # accuracies that differ by less count as equal


def train(name: str, rate: float, seed: int, size: dict[str, int], update_every: int | None = None) -> dict[str, float]:
    """Return loss, test accuracy and processor seconds per step; the rate falls along a cosine."""
    torch.manual_seed(seed)
    (images, labels), (test_images, test_labels) = digit_images(size["images"], 500)
    network = residual_network(size["blocks"], size["channels"])
    optimizer = MAKERS[name](network.parameters(), rate)
    if update_every is not None:
        for group in optimizer.param_groups:
            group["update_every"] = update_every
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, size["steps"])
    start = time.process_time()
    for _ in range(size["steps"]):
        batch = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    seconds = (time.process_time() - start) / size["steps"]

    def right(images: Tensor, labels: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            outputs = network(images)
        return F.cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).double().mean().item()

    return {"loss": right(images, labels)[0], "accuracy": right(test_images, test_labels)[1], "seconds": seconds}


def draw(means: dict[str, dict[float, float]]) -> Figure:
    """Plot accuracy by learning rate, over the best rate."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, curve in means.items():
        best = max(curve, key=lambda rate, curve=curve: curve[rate])
        axes.semilogx([rate / best for rate in curve], list(curve.values()), marker=".", label=name)
    axes.set(xlabel="learning rate over the best one", ylabel="test accuracy")
    axes.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Train with all rates from several starts."""
    torch.set_num_threads(1)
    size = {"blocks": 1, "channels": 4, "steps": 25, "images": 256}
    size |= {} if quick else {"blocks": 2, "channels": 6, "steps": 500, "images": 1000}
    seeds = range(1 if quick else 2)
    rates = {name: each[1::3] if quick else each for name, each in RATES.items()}
    work = [(name, rate, seed) for name in rates for rate in rates[name] for seed in seeds]
    runs: dict[str, dict[float, list[dict[str, float]]]] = {name: {} for name in rates}
    for name, rate, seed in tqdm(work, desc="training", leave=False, disable=not progress):
        runs[name].setdefault(rate, []).append(train(name, rate, seed, size))

    means = {
        name: {rate: sum(each["accuracy"] for each in found) / len(found) for rate, found in curve.items()}
        for name, curve in runs.items()
    }
    best = {name: max(curve.values()) for name, curve in means.items()}
    lazy = [train(ADAHESSIAN, best_rate(means[ADAHESSIAN]), seed, size, update_every=5) for seed in seeds]
    # The ratio of the largest to the smallest rate whose accuracy equals the best.
    wide = {}
    for name, curve in means.items():
        good = [rate for rate, accuracy in curve.items() if accuracy > best[name] - WITHIN]
        wide[name] = max(good) / min(good)
    above = {
        name: max(r / best_rate(curve) for r in curve if curve[r] > best[name] - WITHIN)
        for name, curve in means.items()
    }
    step = {name: min(each["seconds"] for found in curve.values() for each in found) for name, curve in runs.items()}
    cost, lazy_cost = step[ADAHESSIAN] / step[ADAM], min(each["seconds"] for each in lazy) / step[ADAM]
    lazy_accuracy = sum(each["accuracy"] for each in lazy) / len(lazy)
    gain = 100 * (best[ADAHESSIAN] - best[ADAM])
    claims = [
        Claim(
            "With AdaHessian, a residual network has a higher test accuracy than with Adam",
            "by 1.80 and 1.45 points (ResNet20 and 32 on CIFAR-10)",
            f"{100 * best[ADAHESSIAN]:.1f} % against {100 * best[ADAM]:.1f} %, with the best rates: {gain:+.1f} points",
            verdict(gain > 0.5, gain > -0.5),
        ),
        Claim(
            "AdaHessian tolerates learning rates several times too large, better than Adam",
            "qualitative (abstract: robust towards its hyperparameters)",
            f"{100 * WITHIN:.0f} points are lost beyond {above[ADAHESSIAN]:.0f} times the best rate, Adam's "
            f"{above[ADAM]:.0f} times; rates as good span a factor of {wide[ADAHESSIAN]:.0f}, Adam's {wide[ADAM]:.0f}",
            verdict(above[ADAHESSIAN] >= 3 and wide[ADAHESSIAN] > wide[ADAM], wide[ADAHESSIAN] >= wide[ADAM]),
        ),
        Claim(
            "A step costs about two of a first-order method",
            "two gradients by theory (abstract: comparable to first-order methods)",
            f"{cost:.1f} times Adam's",
            verdict(1.5 < cost < 2.5, cost < 4),
        ),
        Claim(
            "With curvature on every fifth step, it costs hardly more, and is as accurate",
            "qualitative (delayed updates)",
            f"{lazy_cost:.1f} times Adam's, {100 * lazy_accuracy:.1f} % against {100 * best[ADAHESSIAN]:.1f} %",
            verdict(
                lazy_cost < 2 and lazy_accuracy > best[ADAHESSIAN] - 0.01, lazy_accuracy > best[ADAHESSIAN] - WITHIN
            ),
        ),
        Claim(
            "Lowest training loss",
            "not quoted here",
            ", ".join(
                f"{name} {min(sum(e['loss'] for e in found) / len(found) for found in curve.values()):.1e}"
                for name, curve in runs.items()
            ),
            OURS,
        ),
    ]
    settings = {**size, "seeds": len(seeds), "rates": rates, "batch": 64}
    data = {"runs": runs, "every fifth": lazy, "spans": span(list(wide.values()), 0), "cost": cost}
    return Reproduction(claims, settings, data, draw(means))


def best_rate(curve: dict[float, float]) -> float:
    """Return the rate of the highest accuracy."""
    return max(curve, key=lambda rate: curve[rate])


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
