"""Base class of optimizers that estimate the curvature of a loss while its backward pass runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.graphs import inspect_graph
from hodiff.optim.pending_curvature import Estimates, PendingCurvature
from hodiff.optim.sharded_curvature import ShardedCurvature
from hodiff.optim.watched_backward import Observer, take_by_hand, wait


class ObservedLosses(ShardedCurvature, Observer):
    """Optimizer that observes losses of parameters due for curvature, and announces it to their backward pass."""

    _pending: PendingCurvature
    # Parameters whose losses are observed until the next step.
    _awaited: frozenset[int] = frozenset()

    @abstractmethod
    def _due(self) -> list[Tensor]:
        """Return the parameters that are due for curvature."""

    def awaits(self, leaves: Sequence[Tensor]) -> bool:
        """See `Observer`."""
        return bool(self._reached(leaves))

    def may_take(self, leaves: Sequence[Tensor]) -> bool:
        """See `Observer`."""
        reached = set(map(id, leaves))
        return any(id(p) in reached for p in self.parameters())

    def see(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        """See `Observer`."""
        self._remember(loss, leaves, last=False)

    def passed(self) -> None:
        """See `Observer`."""
        self._pending.passed()

    def backward(self, loss: Tensor) -> None:
        """See `StochasticOptimizer`; the curvature may consume the graph, because no caller needs it afterwards."""
        leaves = inspect_graph(loss).leaves
        # torch computes the gradients of other leaves, and of a loss that is not finite, which `step` rejects.
        if self.second_order and bool(loss.isfinite()) and len(self._reached(leaves)) == len(set(map(id, leaves))):
            self._remember(loss, leaves, last=True)
        else:
            super().backward(loss)

    def _wait(self) -> None:
        """Start or stop observing losses."""
        due = self._due()
        self._awaited = frozenset(map(id, due))
        # The backward pass of `fully_shard` has other leaves, and no second derivative.
        due = [] if self.sharded else due
        self._pending.watch(due)
        wait(self, bool(due))
        by_hand = any(group["update_every"] is None for group in self.param_groups)
        take_by_hand(self, by_hand and not self.sharded)

    def _reached(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves that are due for curvature."""
        reached = set(map(id, leaves))
        return [p for p in self._due() if id(p) in reached]

    def _remember(self, loss: Tensor, leaves: Sequence[Tensor], *, last: bool) -> None:
        """Announce the curvature of a loss to its backward pass; set gradients if the graph was consumed."""
        if not bool(loss.isfinite()):
            # Training scripts skip such a batch; the next batch provides the curvature.
            return
        estimates, gradients = self._estimated(loss, self._reached(leaves), last)
        self._pending.announce(self._written_by(leaves, estimates))
        if gradients:
            # A backward pass runs all hooks; setting `grad` would not.
            torch.autograd.backward([p for p, _ in gradients], [g for _, g in gradients])
            self._pending.passed()

    def _written_by(self, leaves: Sequence[Tensor], estimates: Estimates) -> Estimates:
        """Select the estimates of parameters whose gradients a backward pass writes."""
        written = set(map(id, leaves))
        return [(p, h) for p, h in estimates if id(p) in written]
