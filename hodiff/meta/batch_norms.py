"""Running statistics of batch norms in an inner loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hodiff.common.trees import PyTree
from hodiff.torch_internals.modules import RunningNorm

# Statistics of each task, of all tasks together, or unchanged.
POLICIES = ("per-task", "shared", "frozen")


def moving_statistics(module: nn.Module, policy: str) -> dict[str, Tensor]:
    """Return the buffers, by name, that a forward pass would update; none if the policy is "frozen"."""
    found: dict[str, Tensor] = {}
    for name, norm in () if policy == "frozen" else module.named_modules():
        if isinstance(norm, RunningNorm) and norm.training and norm.track_running_stats:
            found |= {f"{name}.{key}".lstrip("."): buffer for key, buffer in norm.named_buffers(recurse=False)}
    return found


@contextmanager
def frozen_norms(module: nn.Module, policy: str) -> Iterator[None]:
    """Make norms use their running statistics temporarily, if the policy is "frozen"."""
    norms = [
        each for each in module.modules() if policy == "frozen" and isinstance(each, RunningNorm) and each.training
    ]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def stacked(buffers: dict[str, Tensor], tasks: int) -> dict[str, Tensor]:
    """Copy buffers for each task along a new first dimension; counters are shared."""
    return {
        name: each.expand(tasks, *each.shape).clone() if each.is_floating_point() else each.clone()
        for name, each in buffers.items()
    }


def joined(several: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the buffers of chunks of tasks; equal counters are taken once."""
    return {
        name: torch.cat([each[name] for each in several]) if first.is_floating_point() else first
        for name, first in several[0].items()
    }


def average(buffers: PyTree) -> dict[str, Tensor]:
    """Average buffers over tasks; counters are unchanged."""
    return {name: each.mean(0) if each.is_floating_point() else each for name, each in buffers.items()}
