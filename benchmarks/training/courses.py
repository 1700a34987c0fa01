"""Training runs, and the choice of their learning rates."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.training.optimizers import Row
from benchmarks.training.tasks import Data, Task

SPACING = 1.2  # ratio of steps between evaluations of the loss
SEEN = 1200  # examples on which the loss is evaluated
FIRST_ROUND = 4  # the first round of tuning divides the training time by this


@dataclass(frozen=True)
class Course:
    """Training loss by steps and by processor seconds, with the final test score."""

    steps: list[int]
    seconds: list[float]
    losses: list[float]
    test: float

    def by(self, clock: str, moment: float) -> float | None:
        """Return the first recorded loss at or after a moment, or None if training ended before."""
        pairs = zip(getattr(self, clock), self.losses, strict=True)
        return next((loss for at, loss in pairs if at >= moment), None)


def train(task: Task, data: Data, row: Row, rate: float, seed: int, seconds: float) -> Course:
    """Train for some processor seconds, not counting the evaluations of the loss."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = row.make(model, rate)
    count = task.large if row.large else task.batch
    steps, spent, losses = [], [], []
    used, step, following = 0.0, 0, 1
    while used < seconds:
        whole = count >= len(data.inputs)
        chosen = slice(None) if whole else torch.randint(len(data.inputs), (count,))
        inputs, targets = data.inputs[chosen], data.targets[chosen]
        start = time.process_time()
        row.step(model, optimizer, task.loss, inputs, targets)
        used += time.process_time() - start
        step += 1
        if step >= following or used >= seconds:
            with torch.no_grad():
                loss = task.loss(model(data.inputs[:SEEN]), data.targets[:SEEN]).item()
            steps.append(step)
            spent.append(used)
            losses.append(loss if math.isfinite(loss) else math.inf)
            following = math.ceil(SPACING * step)
            if not math.isfinite(loss):
                break
    with torch.no_grad():
        test = task.judge(model(data.test_inputs), data.test_targets)
    return Course(steps, spent, losses, test)


def tune(task: Task, data: Data, row: Row, rates: Sequence[float], seconds: float) -> float:
    """Return the rate with the least final loss: all run for a quarter of the time, the best two for all of it."""

    def end(rate: float, seconds: float) -> float:
        return train(task, data, row, rate, 0, seconds).losses[-1]

    best = list(rates)
    for count, time_of_each in ((2, seconds / FIRST_ROUND), (1, seconds)):
        if len(best) > count:
            best = sorted(best, key=lambda rate: end(rate, time_of_each))[:count]
    return best[0]
