"""Few-shot classification: MAML and ANIL distinguish five new shapes after one image of each.

    python examples/few_shot_digits.py --quick
    python examples/few_shot_digits.py --shots 5 --held-out 2 4 7

A shape is a digit, turned by a multiple of 90 degrees. A task shows K images of each of five shapes, and asks for the
shape of five further images of each. The five shapes have random labels, which only the shown images reveal. Training
tasks use seven digits, test tasks the three others. MAML learns the weights of a convolutional network from which a few
gradient steps on the shown images solve new tasks. ANIL lets these steps change the last layer only. The script checks
the derivatives of the meta-loss, and prints the accuracy on test tasks before and after the steps, with 95% confidence
over tasks. Two baselines show what meta-learning adds. The first takes the same steps from untrained weights. The
second chooses the shape whose mean image is nearest, pixel by pixel, and is hard to beat on such small images. The
script plots accuracy by steps.

Sources: C. Finn, P. Abbeel, S. Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", ICML 2017,
section 5.2, for the protocol (of Omniglot, where turned characters are new classes); A. Raghu, M. Raghu, S. Bengio, O.
Vinyals, "Rapid learning or feature reuse? Towards understanding the effectiveness of MAML", ICLR 2020.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap
from tqdm import trange

import hodiff
from hodiff.checks import along_directions
from hodiff.meta import ANIL, MAML, MetaLearner

mpl.use("Agg")
import matplotlib.pyplot as plt

Tasks = tuple[Tensor, Tensor, Tensor, Tensor]

WAYS, QUERIES = 5, 5
INNER_STEPS, TEST_STEPS = 3, 10
META_RATE, META_BATCH = 3e-3, 16
SHOWN = (0, 1, INNER_STEPS, TEST_STEPS)
SAME_AFTER_HALF_A_TURN = {0, 1, 2, 5, 8, 6, 9}  # roughly; 6 and 9 become each other

LEARNERS: dict[str, Callable[[nn.Module], MetaLearner]] = {
    "ANIL": lambda network: ANIL(network, F.cross_entropy, lr=0.2, steps=INNER_STEPS),
    "MAML": lambda network: MAML(network, F.cross_entropy, lr=0.2, steps=INNER_STEPS),
}


def check(learner: MetaLearner, tasks: Tasks) -> str:
    """Run hodiff's check on the meta-loss, in float64: all routes, gradgradcheck, SciPy's Hessian."""
    learner = learner.double()
    # With zero biases, every empty patch of an image would be at the kink of ReLU.
    point = {name: each.detach() + 0.1 * (each.dim() == 1) for name, each in learner.named_parameters()}
    doubles = tuple(each.double() if each.is_floating_point() else each for each in tasks)

    def meta_loss(parameters: dict[str, Tensor]) -> Tensor:
        loss: Tensor = functional_call(learner, parameters, (doubles,))
        return loss

    few = along_directions(meta_loss, point, count=1, size=3e-4)
    return hodiff.assert_differentiable(few, torch.zeros(1, dtype=torch.float64), vmap=False).summary


def make_shapes(digits: Sequence[int]) -> list[Tensor]:
    """Return the images of every shape of some digits, each (images, 1, 8, 8)."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels)
    return [
        images[targets == digit].rot90(turn, (2, 3))
        for digit in digits
        for turn in range(2 if digit in SAME_AFTER_HALF_A_TURN else 4)
    ]


def draw_task(shapes: Sequence[Tensor], shots: int, generator: torch.Generator) -> Tasks:
    """Draw one task: images shown with their answers, and query images with theirs."""
    order = torch.randperm(len(shapes), generator=generator)[:WAYS].tolist()
    count = shots + QUERIES
    x = torch.stack([shapes[i][torch.randperm(len(shapes[i]), generator=generator)[:count]] for i in order])
    y = torch.arange(WAYS).unsqueeze(1).expand(WAYS, count)
    shown, asked = slice(shots), slice(shots, count)
    return x[:, shown].flatten(0, 1), y[:, shown].flatten(), x[:, asked].flatten(0, 1), y[:, asked].flatten()


def draw_tasks(shapes: Sequence[Tensor], count: int, shots: int, generator: torch.Generator) -> Tasks:
    """Draw some tasks, stacked."""
    tasks = [draw_task(shapes, shots, generator) for _ in range(count)]
    support_x, support_y, query_x, query_y = (torch.stack(parts) for parts in zip(*tasks, strict=True))
    return support_x, support_y, query_x, query_y


def make_network(generator: torch.Generator) -> nn.Module:
    """Return three convolutions and a linear layer."""
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(128, WAYS)),
    )
    for each in network.parameters():
        if each.dim() > 1:
            nn.init.kaiming_normal_(each, generator=generator)
        else:
            nn.init.zeros_(each)
    return network


def train(
    learner: MetaLearner, shapes: Sequence[Tensor], options: argparse.Namespace, label: str, progress: bool
) -> None:
    """Run Adam on new tasks at every step."""
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.Adam(learner.parameters(), lr=META_RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    bar = trange(options.steps, desc=label, leave=False, disable=not progress)
    for step in bar:
        optimizer.zero_grad()
        loss = learner(draw_tasks(shapes, META_BATCH, options.shots, generator))
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def answers(learner: MetaLearner, tasks: Tasks, steps: int) -> Tensor:
    """Return the percentage of right answers in each task after some steps."""
    support_x, support_y, query_x, query_y = tasks
    with torch.no_grad():
        adapted = learner.adapt_all((support_x, support_y), steps).params
        logits = vmap(lambda weights, x: functional_call(learner.module, weights, (x,)))(adapted, query_x)
    return percentage(logits.argmax(dim=2), query_y)


def nearest_mean(tasks: Tasks) -> Tensor:
    """Return the percentage of right answers in each task if the answer is the shape with the nearest mean image."""
    support_x, support_y, query_x, query_y = tasks
    of_class = F.one_hot(support_y).float()
    means = of_class.mT @ support_x.flatten(2) / of_class.sum(dim=1).unsqueeze(2)
    return percentage(torch.cdist(query_x.flatten(2), means).argmin(dim=2), query_y)


def percentage(found: Tensor, expected: Tensor) -> Tensor:
    """Return the percentage of right answers in each task."""
    return 100 * (found == expected).float().mean(dim=1)


def mean_and_confidence(percentages: Tensor) -> tuple[float, float]:
    """Return the mean over tasks, and the half-width of its 95% confidence interval."""
    return percentages.mean().item(), 1.96 * percentages.std().item() / math.sqrt(len(percentages))


def draw(curves: dict[str, list[Tensor]], other: Tensor, path: Path) -> None:
    """Plot accuracy by number of steps, with its confidence band."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for label, rows in curves.items():
        mean, half = torch.tensor([mean_and_confidence(row) for row in rows]).T
        (line,) = axes.plot(mean, marker="o", markersize=3, label=label)
        axes.fill_between(range(len(rows)), mean - half, mean + half, color=line.get_color(), alpha=0.2)
    axes.axhline(mean_and_confidence(other)[0], color="black", linestyle="--", label="nearest mean image")
    axes.axhline(100 / WAYS, color="grey", linestyle=":", label="guessing")
    axes.set(xlabel="gradient steps on the images shown", ylabel="accuracy on new shapes, %")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="MAML and ANIL on digits that they have never seen.")
    parser.add_argument("--quick", action="store_true", help="take 60 meta-steps, with 100 test tasks")
    parser.add_argument("--steps", type=int, default=100, help="number of meta-steps; many more overfit the 14 shapes")
    parser.add_argument("--tasks", type=int, default=300, help="number of test tasks")
    parser.add_argument("--shots", type=int, default=1, help="number of images shown of each shape")
    parser.add_argument("--held-out", type=int, nargs="+", default=[3, 4, 7], help="digits for test tasks only")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the tasks")
    parser.add_argument(
        "--out", "--output", type=Path, default=Path("figures/few_shot_digits.png"), help="path of the figure"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args(arguments)
    options.held_out = sorted(set(options.held_out))
    if not (set(options.held_out) <= set(range(10)) and 3 <= len(options.held_out) <= 7):
        parser.error(f"--held-out: expected 3 to 7 different digits, got {options.held_out}")
    if options.quick:
        options.steps, options.tasks = 60, 100
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, test and draw."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    known = make_shapes([digit for digit in range(10) if digit not in options.held_out])
    new = make_shapes(options.held_out)
    test = draw_tasks(new, options.tasks, options.shots, torch.Generator().manual_seed(10_000))

    print(f"{options.tasks} tasks of {WAYS} of the {len(new)} shapes of the new digits {options.held_out}, of which")
    print(f"{options.shots} shown of each; accuracy with 95% confidence, guessing is {100 / WAYS:.0f} %\n")
    network = make_network(torch.Generator().manual_seed(options.seed))
    first = draw_tasks(known, 1, options.shots, torch.Generator().manual_seed(options.seed))
    print(f"{check(LEARNERS['MAML'](network), first)}\n")
    print(f"{'after steps':24}" + "".join(f"{steps:>16}" for steps in SHOWN))

    def row(name: str, results: Sequence[Tensor]) -> None:
        cells = ["{:.1f} ± {:.1f} %".format(*mean_and_confidence(each)) for each in results]
        print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)

    curves = {}
    for name, make in {"untrained": LEARNERS["MAML"], **LEARNERS}.items():
        learner = make(make_network(torch.Generator().manual_seed(options.seed)))
        if name != "untrained":
            train(learner, known, options, name, progress)
        curves[name] = [answers(learner, test, steps) for steps in range(TEST_STEPS + 1)]
        row(name, [curves[name][steps] for steps in SHOWN])
    other = nearest_mean(test)
    row("nearest mean image", [other])
    draw(curves, other, options.out)
    print(f"\nFigure: {options.out}")


if __name__ == "__main__":
    main()
