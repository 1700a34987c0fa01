"""One inner loop: its step, and the segments of steps that are stored, recomputed or constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree
from hodiff.meta.gradients import Gradient, Loss, clipped, constant_gradient, detached
from hodiff.meta.optimizer import Optimizer, OptimizerState
from hodiff.recompute.checkpoint import checkpoint as recomputed

# Parameters, the optimizer's state, and buffers.
Point = tuple[PyTree, OptimizerState, PyTree]


@dataclass(eq=False)
class Loop:
    """Operations of each step; `clip` is a norm, a function of gradients, or None."""

    loss: Loss
    gradient: Callable[..., Gradient]
    optimizer: Optimizer
    clip: Any

    def step(self, point: Point, batch: PyTree) -> tuple[Point, Tensor, PyTree]:
        """Return the next point, the loss, and the gradients that the optimizer gets."""
        params, state, buffers = point
        leaves, spec = pytree.tree_flatten(params)
        value, gradients, buffers = self.gradient(self.loss, leaves, batch, buffers)
        if self.clip is not None and not callable(self.clip):
            gradients = clipped(gradients, self.clip)
        tree = pytree.tree_unflatten(gradients, spec)
        if callable(self.clip):
            tree = self.clip(tree)
        params, state = self.optimizer.update(tree, state, params)
        return (params, state, buffers), value.detach(), tree

    def run(self, point: Point, batches: Sequence[PyTree]) -> tuple[Point, list[Tensor]]:
        """Take some steps; return the last point and the losses."""
        losses = []
        for batch in batches:
            point, value, _ = self.step(point, batch)
            losses.append(value)
        return point, losses

    def run_recomputed(self, point: Point, batches: Sequence[PyTree]) -> tuple[Point, list[Tensor]]:
        """Take some steps, storing only the ends."""
        return recomputed(self.run, point, batches)

    def run_constant(self, point: Point, batches: Sequence[PyTree]) -> tuple[Point, list[Tensor]]:
        """Take some steps without a graph; the parameters count as their start plus a constant."""
        start, _, _ = point
        constant = Loop(self.loss, constant_gradient, self.optimizer, self.clip)
        with torch.no_grad():
            point, losses = constant.run(detached(point), batches)
        params, state, buffers = detached(point)
        # The added difference has value zero and derivative one.
        params = pytree.tree_map(lambda end, begin: end + (begin - begin.detach()), params, start)
        return (params, state, buffers), losses


def segments(steps: int, constant: int, checkpoint: int | None) -> Iterator[tuple[int, int, str]]:
    """Iterate over start, stop and `Loop` method of each segment; `constant` steps come first."""
    if constant:
        yield 0, constant, "run_constant"
    length = checkpoint or 1
    for start in range(constant, steps, length):
        yield start, min(start + length, steps), "run_recomputed" if checkpoint else "run"
