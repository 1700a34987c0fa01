"""Implicit MAML: a meta-gradient as accurate as by unrolling, whose memory does not grow with the inner steps.

    python examples/imaml_memory.py --quick
    python examples/imaml_memory.py

The inner loop fits a network to 50 images of digits by gradient descent, with a penalty on the distance from its
starting weights. The meta-gradient is the gradient of the loss on 200 other images with respect to the starting
weights. The script computes it in three ways:

- unrolled: backward through all inner steps, which are all stored;
- checkpointed: the same, but only every sqrt(T)-th step is stored, and the steps between are recomputed;
- implicit: conjugate gradients at the end of the inner loop, without storing any step.

As the number of steps T grows, all three converge to the same limit. The script prints and plots their distance from
it, and the memory of each: how much one meta-gradient raises the peak of resident memory in a fresh process, above the
peak with two steps. The limit is an unrolled meta-gradient of very many steps, in float64. An implicit meta-gradient
with an accurately solved linear system must agree with it. If it does not, the script prints an error and ends with
exit status 1.

Source: A. Rajeswaran, C. Finn, S. Kakade, S. Levine, "Meta-learning with implicit gradients", NeurIPS 2019, figure 2.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import hodiff
from hodiff.checks import along_directions
from hodiff.meta import IMAML, MetaLearner

mpl.use("Agg")
import matplotlib.pyplot as plt

Tasks = tuple[Tensor, Tensor, Tensor, Tensor]

INNER_RATE, STRENGTH = 0.1, 0.5
SUPPORT, QUERY = 50, 200
LIMIT_STEPS = 450  # each step shrinks the distance to the limit by about INNER_RATE * STRENGTH, or more
LIMITS_AGREE_TO = 1e-6  # relative
KIBIBYTE = 1024 if sys.platform != "darwin" else 1  # unit of `ru_maxrss`


class UnrolledIMAML(IMAML):
    """IMAML whose inner loop is differentiated step by step."""

    def forward(self, tasks: Any) -> Tensor:
        """Compute the mean of the tasks' losses after adaptation."""
        parts = [self.query_losses((x, y), (query_x, query_y)) for x, y, query_x, query_y in self.chunks(tasks)]
        return torch.cat(parts).mean()


def unrolled(network: nn.Module, steps: int, **options: Any) -> MetaLearner:
    """Return a learner that keeps every step, or with `checkpoint=k` every k-th step."""
    return UnrolledIMAML(network, F.cross_entropy, INNER_RATE, steps, strength=STRENGTH, **options)


def implicit(network: nn.Module, steps: int, **options: Any) -> MetaLearner:
    """Return a learner that keeps no step."""
    return IMAML(network, F.cross_entropy, INNER_RATE, steps, strength=STRENGTH, cg_steps=300, **options)


WAYS: dict[str, Callable[[nn.Module, int], MetaLearner]] = {
    "unrolled": unrolled,
    "checkpointed": lambda network, steps: unrolled(network, steps, checkpoint=math.isqrt(steps)),
    "implicit": lambda network, steps: implicit(network, steps, cg_tolerance=1e-8),
}


@dataclass(frozen=True)
class Job:
    """Meta-gradient to be measured."""

    way: str
    steps: int
    hidden: int
    seed: int


@dataclass(frozen=True)
class Measurement:
    """Meta-gradient with its memory and time."""

    gradient: np.ndarray
    mebibytes: float
    seconds: float


def make_problem(hidden: int, seed: int) -> tuple[nn.Module, Tasks]:
    """Return a network with one hidden layer, and one task of digits."""
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()
    for each in network.parameters():
        nn.init.normal_(each, std=each.shape[-1] ** -0.5, generator=generator)
    pixels, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(labels), generator=generator)[: SUPPORT + QUERY]
    x, y = torch.from_numpy(pixels)[chosen] / 16, torch.from_numpy(labels)[chosen]
    return network, (x[None, :SUPPORT], y[None, :SUPPORT], x[None, SUPPORT:], y[None, SUPPORT:])


def meta_gradient(learner: MetaLearner, tasks: Tasks) -> Tensor:
    """Compute the meta-gradient in one vector."""
    return torch.cat([each.flatten() for each in torch.autograd.grad(learner(tasks), list(learner.parameters()))])


def check(seed: int) -> str:
    """Run hodiff's check on the unrolled meta-loss: all routes, gradgradcheck, SciPy's Hessian."""
    network, tasks = make_problem(4, seed)
    learner = unrolled(network, 4)
    point = {name: each.detach() for name, each in learner.named_parameters()}

    def meta_loss(parameters: dict[str, Tensor]) -> Tensor:
        loss: Tensor = torch.func.functional_call(learner, parameters, (tasks,))
        return loss

    few = along_directions(meta_loss, point, count=1)
    return hodiff.assert_differentiable(few, torch.zeros(1, dtype=torch.float64), vmap=False).summary


def peak() -> float:
    """Return the highest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE / 2**20


def measure(job: Job) -> Measurement:
    """Measure one meta-gradient in a fresh process, after a warm-up of two steps that loads torch's libraries."""
    torch.set_num_threads(1)
    network, tasks = make_problem(job.hidden, job.seed)
    meta_gradient(WAYS[job.way](network, 2), tasks)
    before, start = peak(), time.perf_counter()
    gradient = meta_gradient(WAYS[job.way](network, job.steps), tasks)
    seconds = time.perf_counter() - start
    return Measurement(gradient.numpy(), peak() - before, seconds)


def measure_all(jobs: Sequence[Job], progress: bool) -> Iterator[tuple[Job, Measurement]]:
    """Measure every job in a fresh process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hodiff.meta", "matplotlib.pyplot", "sklearn.datasets"])  # slow imports
    with context.Pool(1, maxtasksperchild=1) as pool:
        found = pool.imap(measure, jobs)
        yield from tqdm(zip(jobs, found, strict=True), "measured", len(jobs), leave=False, disable=not progress)


def find_limit(hidden: int, seed: int) -> tuple[np.ndarray, float]:
    """Return the meta-gradient of very many steps, and the relative difference of its two computations."""
    network, tasks = make_problem(hidden, seed)
    limit = meta_gradient(unrolled(network, LIMIT_STEPS, checkpoint=math.isqrt(LIMIT_STEPS)), tasks)
    other = meta_gradient(implicit(network, LIMIT_STEPS, cg_tolerance=1e-11), tasks)
    distance = ((other - limit).norm() / limit.norm()).item()
    if not distance <= LIMITS_AGREE_TO:
        raise hodiff.CheckError(f"after {LIMIT_STEPS} steps unrolled and implicit are {distance:.1e} apart.")
    return limit.numpy(), distance


def draw(steps: Sequence[int], errors: dict[str, list[float]], memory: dict[str, list[float]], path: Path) -> None:
    """Plot errors and memory against the number of steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axes, curves in ((left, errors), (right, memory)):
        for (way, values), style in zip(curves.items(), ("o-", "s--", "^-"), strict=True):
            axes.plot(steps, values, style, label=way, markersize=5)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("inner steps")
        axes.grid(alpha=0.3)
        axes.legend()
    left.set(title="relative error of the meta-gradient", yscale="log")
    right.set(title="peak memory above that of two steps, MiB")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Error and memory of implicit and unrolled meta-gradients.")
    parser.add_argument("--quick", action="store_true", help="use two numbers of steps and a smaller network")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256], help="numbers of inner steps"
    )
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden layer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the images")
    parser.add_argument(
        "--out", "--output", type=Path, default=Path("figures/imaml_memory.png"), help="path of the figure"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bar")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.hidden = [16, 128], 128
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and draw."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    jobs = [Job(way, steps, options.hidden, options.seed) for steps in options.steps for way in WAYS]
    found = dict(measure_all(jobs, progress))
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    limit, distance = find_limit(options.hidden, options.seed)
    print(f"meta-gradient of a network 64-{options.hidden}-10 in {len(limit):,} weights, float64")
    print(f"after {LIMIT_STEPS:,} steps unrolled and implicit are {distance:.1e} (relative) apart")
    print(f"{check(options.seed)}\n")

    def column(value: Callable[[Measurement], float]) -> dict[str, list[float]]:
        return {way: [value(each) for job, each in found.items() if job.way == way] for way in WAYS}

    errors = column(lambda each: float(np.linalg.norm(each.gradient - limit) / np.linalg.norm(limit)))
    memory, seconds = column(lambda each: each.mebibytes), column(lambda each: each.seconds)
    tables = (("error", errors, "9.1e"), ("MiB", memory, "9.1f"), ("seconds", seconds, "9.2f"))
    for title, values, form in tables:
        print(f"{title:14}" + "".join(f"{f'T={steps}':>9}" for steps in options.steps))
        for way in WAYS:
            print(f"  {way:12}" + "".join(f"{value:{form}}" for value in values[way]))
        print()
    draw(options.steps, errors, memory, options.out)
    print(f"Figure: {options.out}")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as disagreement:
        sys.exit(f"Derivatives disagree: {disagreement}")
