"""Does curvature pay? Optimizers of first and second order train a small network on digits, by steps and by seconds.

    python examples/digits_optimizers.py

Every optimizer is tuned by the same learning rates, on one seed, for the loss at the end of its time; then it trains
from three seeds, and medians count. The loss is that of all training images, and is computed with the clock stopped;
seconds are those of the processor, so that a busy machine changes little. LBFGS and HessianFree
see all images in every step, the others batches.

In the saved run (benchmarks/results/digits_optimizers.md) a step of HessianFree costs fifty of Adam's, and is worth
fewer at first and more in the end: it is last after a fifth of a second, and first after two. LBFGS, for which all
images are one batch here, is first after a fifth of a second and soon at its tolerance. SophiaG ends below Adam, and is
behind until then. AdaHessian takes a product with the Hessian in every step, so that it makes a fifth of Adam's steps
in the same time, and is behind it throughout.

`OPTIMIZERS` is a table: another one is one more row of it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import hodiff
from hodiff.checks import along_directions
from hodiff.optim import KFAC, LBFGS, SOAP, AdaHessian, HessianFree, Shampoo, SophiaG

mpl.use("Agg")
import matplotlib.pyplot as plt

TRAINED = 1200  # images
BATCH = 128
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SPACING = 1.2  # from one look at the loss to the next, in steps

Step = Callable[[nn.Module, Any, Tensor, Tensor], object]


def loop(model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor) -> None:
    """A step of an ordinary loop."""
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()


def closure(model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor) -> None:
    """A step that computes the loss as often as it needs it."""
    optimizer.step(lambda: cross_entropy(model(images), labels))


def pair(model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor) -> None:
    """A step that knows where the model ends and the loss begins."""
    optimizer.step(lambda: (model(images), lambda outputs: cross_entropy(outputs, labels)))


@dataclass(frozen=True)
class Row:
    """How to make an optimizer of parameters and a learning rate, how it steps, and on how many images."""

    make: Callable[..., Any]
    step: Step = loop
    batch: int = BATCH


OPTIMIZERS = {
    "SGD, momentum 0.9": Row(lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9)),
    "Adam": Row(torch.optim.Adam),
    "AdaHessian": Row(AdaHessian),
    "SophiaG": Row(SophiaG),
    "Shampoo": Row(Shampoo),
    "SOAP": Row(SOAP),
    "KFAC": Row(KFAC),
    "LBFGS": Row(partial(LBFGS, max_iter=1), closure, TRAINED),
    "HessianFree": Row(HessianFree, pair, TRAINED),
}


@dataclass(frozen=True)
class Course:
    """The loss by steps and by seconds, and the share of test images that are read rightly at the end."""

    steps: list[int]
    seconds: list[float]
    losses: list[float]
    accuracy: float

    def by(self, clock: str, moment: float) -> float | None:
        """The first loss that was seen at or after a moment, if it was reached."""
        pairs = zip(getattr(self, clock), self.losses, strict=True)
        return next((loss for at, loss in pairs if at >= moment), None)


def load() -> tuple[Tensor, Tensor]:
    """Images with pixels from 0 to 1, in a random order, and their labels."""
    pixels, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return pixels[order].float() / 16, labels[order]


def make_network() -> nn.Module:
    """Two hidden layers of 64."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def train(row: Row, rate: float, seed: int, seconds: float) -> Course:
    """Train for some seconds of the processor."""
    images, labels = load()
    torch.manual_seed(seed)
    model = make_network()
    optimizer = row.make(model.parameters(), lr=rate)
    steps, spent, losses = [], [], []
    used, step, following = 0.0, 0, 1
    while used < seconds:
        chosen = torch.randperm(TRAINED)[: row.batch] if row.batch < TRAINED else slice(TRAINED)
        start = time.process_time()
        row.step(model, optimizer, images[chosen], labels[chosen])
        used += time.process_time() - start
        step += 1
        if step >= following or used >= seconds:
            with torch.no_grad():
                loss = cross_entropy(model(images[:TRAINED]), labels[:TRAINED]).item()
            steps.append(step)
            spent.append(used)
            losses.append(loss if math.isfinite(loss) else math.inf)
            following = math.ceil(SPACING * step)
    with torch.no_grad():
        right = model(images[TRAINED:]).argmax(dim=1) == labels[TRAINED:]
    return Course(steps, spent, losses, right.double().mean().item())


def tune(row: Row, rates: Sequence[float], seconds: float) -> float:
    """The rate with the least loss at the end."""
    return min(rates, key=lambda rate: train(row, rate, 0, seconds).losses[-1])


def middle(losses: Sequence[float | None]) -> str:
    """The median, where all courses came as far."""
    reached = [loss for loss in losses if loss is not None]
    return f"{median(reached):.2g}" if len(reached) == len(losses) else ""


def table(rates: dict[str, float], courses: dict[str, list[Course]], seconds: float) -> str:
    """Medians over the seeds, in Markdown."""
    moments = [("steps", 10), ("steps", 100), ("seconds", seconds / 10), ("seconds", seconds)]
    heads = [f"loss after {moment:g} {clock}" for clock, moment in moments]
    lines = [" | ".join(["| optimizer", "rate", *heads, "steps", "test, % |"]), "|---" + "|---:" * 7 + "|"]
    for name, found in courses.items():
        losses = [middle([course.by(clock, moment) for course in found]) for clock, moment in moments]
        steps = f"{median(course.steps[-1] for course in found):,.0f}"
        accuracy = f"{100 * median(course.accuracy for course in found):.1f}"
        lines.append(" | ".join([f"| {name}", f"{rates[name]:g}", *losses, steps, f"{accuracy} |"]))
    return "\n".join(lines)


def check() -> str:
    """What hodiff's check says of the loss: all routes, gradgradcheck, SciPy's Hessian."""
    images, labels = load()
    torch.manual_seed(0)
    model = make_network().double()

    def loss(x: dict[str, Tensor]) -> Tensor:
        return cross_entropy(functional_call(model, x, (images[:BATCH].double(),)), labels[:BATCH])

    few = along_directions(loss, {name: each.detach() for name, each in model.named_parameters()}, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(courses: dict[str, list[Course]], path: Path) -> None:
    """The loss against steps and against seconds."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axes, clock in zip(panels, ("steps", "seconds"), strict=True):
        for color, (name, found) in enumerate(courses.items()):
            for index, course in enumerate(found):
                label = "_" * bool(index) + name
                axes.plot(getattr(course, clock), course.losses, color=f"C{color}", linewidth=0.9, label=label)
        axes.set(xlabel=clock, xscale="log", yscale="log")
    panels[0].set(ylabel="training loss", ylim=(1e-8, 5))
    panels[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train, print the table."""
    parser = argparse.ArgumentParser(description="Optimizers of first and second order on digits.")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each training")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to tune with")
    parser.add_argument("--seeds", type=int, default=3, help="trainings that count")
    parser.add_argument("--output", type=Path, default=Path("figures/digits_optimizers.png"), help="the figure's path")
    parser.add_argument("--save", type=Path, help="where to put the table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # seconds of the processor are then those of one core
    print(check())
    # What torch and hodiff do on first use belongs to no optimizer.
    for row in OPTIMIZERS.values():
        train(row, RATES[0], 0, 1e-3)
    rates = {name: tune(row, options.rates, options.seconds) for name, row in OPTIMIZERS.items()}
    courses = {
        name: [train(row, rates[name], seed, options.seconds) for seed in range(options.seeds)]
        for name, row in OPTIMIZERS.items()
    }
    text = table(rates, courses, options.seconds)
    print(f"\n{text}")
    if options.save:
        title = (
            f"# Optimizers on digits\n\n`python examples/{Path(__file__).name}`, one core, torch {torch.__version__}"
        )
        options.save.write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    draw(courses, options.output)
    print(f"\nLoss by steps and by seconds: {options.output}")


if __name__ == "__main__":
    main()
