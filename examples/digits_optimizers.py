"""One training loop with Adam, SOAP, K-FAC and Hessian-free steps: a small network learns digits.

    python examples/digits_optimizers.py

The optimizers of `hodiff.optim` replace Adam in a training loop. Only HessianFree changes another line: it evaluates
the loss several times per step, by a closure that returns outputs and loss. It uses all training images in every step,
the other optimizers use batches of 128. The printed loss is on all training images, and its computation does not count
as time. Seconds are processor seconds.

Learning rates were chosen by `python -m benchmarks --only training`, which tunes all of `hodiff.optim` on four tasks
and reports losses by steps and by seconds (benchmarks/results/training.md).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import hodiff
from hodiff.checks import along_directions
from hodiff.optim import KFAC, SOAP, HessianFree

mpl.use("Agg")
import matplotlib.pyplot as plt

TRAINED = 1200  # images
BATCH = 128
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.03),
    "SOAP": lambda model: SOAP(model.parameters(), lr=0.03),
    "KFAC": lambda model: KFAC(model.parameters(), lr=0.03),
    "HessianFree": lambda model: HessianFree(model.parameters()),
}
Course = list[tuple[float, int, float]]  # seconds, steps and the loss


def load() -> tuple[Tensor, Tensor]:
    """Return images with pixels from 0 to 1, in a random order, and their labels."""
    pixels, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return pixels[order].float() / 16, labels[order]


def make_network() -> nn.Module:
    """Return a network with two hidden layers of 64."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def take_step(model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor) -> None:
    """Take one step with any of the optimizers."""
    if isinstance(optimizer, HessianFree):
        optimizer.step(lambda: (model(images), lambda outputs: cross_entropy(outputs, labels)))
        return
    chosen = torch.randperm(len(images))[:BATCH]
    optimizer.zero_grad()
    cross_entropy(model(images[chosen]), labels[chosen]).backward()
    optimizer.step()


def train(make: Callable[[nn.Module], Any], seconds: float) -> tuple[Course, float]:
    """Train for some processor seconds; return the course, and the share of test images classified right."""
    images, labels = load()
    torch.manual_seed(0)
    model = make_network()
    optimizer = make(model)
    course: Course = []
    used, step, following = 0.0, 0, 1
    while used < seconds:
        start = time.process_time()
        take_step(model, optimizer, images[:TRAINED], labels[:TRAINED])
        used, step = used + time.process_time() - start, step + 1
        if step >= following or used >= seconds:
            with torch.no_grad():
                course.append((used, step, cross_entropy(model(images[:TRAINED]), labels[:TRAINED]).item()))
            following = math.ceil(1.2 * step)
    with torch.no_grad():
        right = model(images[TRAINED:]).argmax(dim=1) == labels[TRAINED:]
    return course, right.double().mean().item()


def check() -> str:
    """Run hodiff's check on the loss: all routes, gradgradcheck, SciPy's Hessian."""
    images, labels = load()
    torch.manual_seed(0)
    model = make_network().double()

    def loss(x: dict[str, Tensor]) -> Tensor:
        return cross_entropy(functional_call(model, x, (images[:BATCH].double(),)), labels[:BATCH])

    few = along_directions(loss, {name: each.detach() for name, each in model.named_parameters()}, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(courses: dict[str, Course], path: Path) -> None:
    """Plot the loss against steps and against seconds."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for name, course in courses.items():
        seconds, steps, losses = zip(*course, strict=True)
        panels[0].plot(steps, losses, label=name)
        panels[1].plot(seconds, losses)
    for axes, clock in zip(panels, ("steps", "seconds"), strict=True):
        axes.set(xlabel=clock, xscale="log", yscale="log")
    panels[0].set(ylabel="training loss", ylim=(1e-8, 5))
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with every optimizer, and print and plot the results."""
    parser = argparse.ArgumentParser(description="Optimizers of first and second order on digits.")
    parser.add_argument("--seconds", type=float, default=2.0, help="processor seconds of each training")
    parser.add_argument("--output", type=Path, default=Path("figures/digits_optimizers.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # Processor seconds are then seconds of one core.
    print(f"{check()}\n")
    courses = {}
    for name, make in OPTIMIZERS.items():
        train(make, 1e-3)  # Warm up: work on first use counts for no optimizer.
        courses[name], right = train(make, options.seconds)
        _, steps, loss = courses[name][-1]
        print(f"{name:12} {steps:6,} steps, loss {loss:.1e}, {100 * right:.1f} % of test images")
    draw(courses, options.output)
    print(f"\nFigure: {options.output}")


if __name__ == "__main__":
    main()
