"""Peak memory of meta-gradients: for the timed meta-steps, and for long inner loops by their number of steps.

Every contestant runs in its own process, measured as in `benchmarks.memory`.

    python -m benchmarks.meta_memory 200 "hodiff MAML, checkpoint"     prints bytes: one task of digits, 200 inner steps
"""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.memory import ROOT, STATUS, Peak, status
from benchmarks.workloads.meta import Episode, batched, digits_cnn, sinusoid, task_by_task
from hodiff.meta import IMAML, MAML, MetaLearner

TITLE = (
    "Peak memory, MiB: the meta-steps above, and long inner loops of the digits' CNN on one task of 64 + 64 images, by "
    "inner steps T"
)
LENGTHS = (50, 100, 200, 400, 800, 1000)
EPISODES: dict[str, Callable[[], Episode]] = {
    "sinusoid": sinusoid,
    "digits-cnn": digits_cnn,
    **{f"T={steps}": partial(digits_cnn, tasks=1, images=64, steps=steps) for steps in LENGTHS},
}


def by_transforms(episode: Episode) -> object:
    """Compute the meta-gradient of all tasks at once by `torch.func`."""
    return batched(episode)({name: each.detach() for name, each in episode.parameters().items()})


def by_learner(learner: MetaLearner, episode: Episode) -> Sequence[Tensor]:
    """Compute a meta-gradient by a meta-learner of hodiff."""
    return torch.autograd.grad(learner(episode.tasks), list(learner.parameters()))


def unrolled(episode: Episode) -> object:
    """Compute the meta-gradient by MAML, which keeps every step."""
    return by_learner(MAML(episode.network, episode.loss, episode.rate, episode.steps), episode)


def checkpointed(episode: Episode) -> object:
    """Compute the meta-gradient by MAML, which keeps about every sqrt(T)-th step."""
    length = math.isqrt(episode.steps)
    return by_learner(MAML(episode.network, episode.loss, episode.rate, episode.steps, checkpoint=length), episode)


def implicit(episode: Episode) -> object:
    """Compute the meta-gradient by IMAML, which keeps no step."""
    return by_learner(IMAML(episode.network, episode.loss, episode.rate, episode.steps, strength=2.0), episode)


WAYS: dict[str, Callable[[Episode], object]] = {
    "torch, loop over tasks": task_by_task,
    "torch.func, vmap of grad": by_transforms,
    "hodiff MAML": unrolled,
    "hodiff MAML, checkpoint": checkpointed,
    "hodiff IMAML": implicit,
}


def peaks(quick: bool) -> list[Peak]:
    """Measure the peaks of all ways; none without `/proc/self/status`.

    Args:
        quick: Whether to measure the shortest loop alone, in two ways.

    Returns:
        One peak per episode and way.
    """
    if not STATUS.exists():
        return []
    names = [f"T={LENGTHS[0]}"] if quick else list(EPISODES)
    ways = ["hodiff MAML", "hodiff MAML, checkpoint"] if quick else list(WAYS)
    todo = [(name, way) for name in names for way in ways]
    return [Peak(name, way, peak_of(name, way) / 2**20) for name, way in tqdm(todo, "peak memory", leave=False)]


def peak_of(name: str, way: str) -> int:
    """Return the bytes that one way needed, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.meta_memory", name, way]
    return int(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def draw(found: Sequence[Peak], directory: Path) -> None:
    """Plot memory against the number of inner steps, with a square root for comparison.

    Args:
        found: The peaks.
        directory: Folder for the figure `meta-memory.png`.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    for way in WAYS:
        points = [(int(p.problem[2:]), p.mebibytes) for p in found if p.name == way and p.problem.startswith("T=")]
        if not points:
            continue
        (line,) = axes.loglog(*zip(*points, strict=True), "o-", label=way, markersize=4)
        if way == "hodiff MAML, checkpoint":
            steps, values = zip(*points, strict=True)
            root = [values[0] * math.sqrt(each / steps[0]) for each in steps]
            axes.loglog(steps, root, ":", color=line.get_color(), label=r"$\sqrt{T}$")
    axes.set(xlabel="inner steps T", ylabel="peak memory, MiB", title="meta-gradient of a digits CNN")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    directory.mkdir(parents=True, exist_ok=True)
    figure.savefig(directory / "meta-memory.png", dpi=150)
    plt.close(figure)


def main(name: str, way: str) -> None:
    """Measure this process and print its peak in bytes."""
    name = name if name in EPISODES else f"T={name}"
    warnings.simplefilter("ignore")  # Systems that are not fully solved warn; they need the same memory.
    WAYS[way](digits_cnn(tasks=1, images=2, steps=2))
    episode = EPISODES[name]()
    # Writing 5 resets the high-water mark, which loading the libraries raised.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = status("VmRSS")
    WAYS[way](episode)
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
