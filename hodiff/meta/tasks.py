"""Tasks of an inner loop: one batch for every step, or a batch for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from hodiff.errors import InputError


def batch_source(task: Any, steps: int, caller: str) -> Callable[[int], Any]:
    """Return a function from the step, counted from 0, to its batch; it raises if the task has no more batches."""
    if callable(task):
        return task
    if isinstance(task, (Tensor, tuple, list, dict, str)) or not isinstance(task, Iterable):
        return lambda _: task
    iterator = iter(task)

    def following(step: int) -> Any:
        try:
            return next(iterator)
        except StopIteration:
            raise InputError(
                f"{caller}: task: expected {steps} batches, one a step, got {step}; pass fewer steps, or "
                "itertools.cycle(task)."
            ) from None

    return following
