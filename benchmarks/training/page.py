"""All training runs, their tables and their figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.training.courses import Course, train, tune
from benchmarks.training.optimizers import OPTIMIZERS
from benchmarks.training.tasks import TASKS, Task

RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS = 3
PICTURE = "training.png"

Courses = dict[str, list[Course]]


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield title, table and data of every task; quick uses one rate and one seed for a twentieth of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Processor seconds are then seconds of one core.
    try:
        for task in TASKS.values():
            seconds = task.seconds / 20 if quick else task.seconds
            rates, courses = race(task, RATES[3:4] if quick else RATES, 1 if quick else SEEDS, seconds)
            found = {
                name: {"rate": rates[name], "courses": [as_json(each) for each in courses[name]]} for name in courses
            }
            yield task.title, f"{settings(task)}\n\n{table(task, rates, courses, seconds)}", found
    finally:
        torch.set_num_threads(threads)


def as_json(course: Course) -> dict[str, Any]:
    """Return a course as a dict, with None for numbers that are not finite."""
    finite = [loss if math.isfinite(loss) else None for loss in course.losses]
    return {**asdict(course), "losses": finite, "test": course.test if math.isfinite(course.test) else None}


def race(task: Task, rates: Sequence[float], seeds: int, seconds: float) -> tuple[dict[str, float], Courses]:
    """Choose the learning rate and train the courses of every optimizer that supports the task."""
    data = task.load()
    rows = {name: row for name, row in OPTIMIZERS.items() if name.strip("`") not in task.without}
    # Warm up: work that torch and hodiff do on first use counts for no optimizer.
    for row in rows.values():
        train(task, data, row, rates[0], 0, 1e-3)
    best = {name: tune(task, data, row, rates, seconds) for name, row in rows.items()}
    return best, {
        name: [train(task, data, row, best[name], seed, seconds) for seed in range(seeds)] for name, row in rows.items()
    }


def settings(task: Task) -> str:
    """Describe the batch sizes and the optimizers that are left out."""
    text = f"Batches of {task.batch:,}; {task.large:,} for " + ", ".join(
        n for n, row in OPTIMIZERS.items() if row.large
    )
    return f"{text}." + "".join(f" Without `{name}`, which {why}." for name, why in task.without.items())


def middle(losses: Sequence[float | None]) -> str:
    """Format the median, or return an empty string if some courses ended before."""
    reached = [loss for loss in losses if loss is not None]
    return f"{median(reached):.2g}" if len(reached) == len(losses) else ""


def table(task: Task, rates: dict[str, float], courses: Courses, seconds: float) -> str:
    """Return medians over the seeds as a Markdown table."""
    moments = [("steps", 10), ("steps", 100), ("seconds", seconds / 10), ("seconds", seconds)]
    heads = [f"loss after {moment:g} {clock}" for clock, moment in moments]
    lines = [" | ".join(["| optimizer", "rate", *heads, "steps", f"{task.told} |"]), "|---" + "|---:" * 7 + "|"]
    for name, found in courses.items():
        losses = [middle([course.by(clock, moment) for course in found]) for clock, moment in moments]
        steps = f"{median(course.steps[-1] for course in found):,.0f}"
        lines.append(" | ".join([f"| {name}", f"{rates[name]:g}", *losses, steps, f"{test_of(found)} |"]))
    return "\n".join(lines)


def test_of(found: Sequence[Course]) -> str:
    """Format the median of the test scores."""
    test = median(course.test for course in found)
    return f"{test:.3g}" if math.isfinite(test) else ""


def draw(parts: dict[str, dict[str, Any]], directory: Path) -> None:
    """Plot the losses of every task against steps and against seconds."""
    figure = Figure(figsize=(11, 3.4 * len(parts)), layout="constrained")
    rows = figure.subplots(len(parts), 2, squeeze=False, sharey="row")
    colors = dict(
        zip(OPTIMIZERS, [*(f"C{i}" for i in range(10)), "black", "gold", "navy", "lime", "crimson"], strict=True)
    )
    for axes_of, (title, found) in zip(rows, parts.items(), strict=True):
        for axes, clock in zip(axes_of, ("steps", "seconds"), strict=True):
            for name, run in found.items():
                for index, course in enumerate(run["courses"]):
                    label = "_" * bool(index) + name.replace("`", "").removeprefix("torch.optim.")
                    losses = [math.nan if loss is None else loss for loss in course["losses"]]
                    axes.plot(course[clock], losses, color=colors[name], linewidth=0.9, label=label)
            axes.set(xlabel=clock, xscale="log", yscale="log")
        axes_of[0].set(title=title, ylabel="training loss")
    rows[0, 0].legend(fontsize="x-small", ncols=2)
    figure.savefig(directory / PICTURE, dpi=80)
