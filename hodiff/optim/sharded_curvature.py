"""Base class of optimizers that estimate the curvature of closures on sharded parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections import Corrections
from hodiff.errors import InputError
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.joint_curvature import JointCurvature
from hodiff.optim.local_models import Closure, detached, require_loss
from hodiff.optim.pending_curvature import Estimates
from hodiff.optim.sharded_closures import ShardedClosure
from hodiff.recompute.lost_slopes import noting_operands


class ShardedCurvature(JointCurvature):
    """Optimizer that evaluates closures on the shards of its parameters when curvature is due."""

    # Whether `_estimate` computes second derivatives, and gradients on the way.
    second_order = True
    # The closure whose curvature is being estimated, if parameters are sharded.
    _closure_on_shards: ShardedClosure | None = None

    @abstractmethod
    def _estimated(self, loss: Tensor, parameters: Sequence[Tensor], last: bool) -> tuple[Estimates, Estimates]:
        """Estimate the curvature, which is joint if the loss is that of all ranks."""

    def _leaves_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves of the graph for parameters: their shards, or they themselves."""
        shards = self._closure_on_shards
        return list(parameters) if shards is None else shards.leaves_of(parameters)

    def _on_shards(self, closure: Closure, due: Sequence[Tensor], *, gradients: bool) -> tuple[Tensor, dict[int, Any]]:
        """Evaluate a closure; return this rank's loss, and the joint estimates of parameters that are due.

        Args:
            closure: The closure.
            due: Parameters whose curvature is estimated, if the loss depends on them.
            gradients: Whether to set `grad` to the joint gradients.

        Returns:
            The loss, and the estimates by the parameter's id.
        """
        shards = ShardedClosure(self.caller, closure, self.parameters(), self._ranks)
        own = set(map(id, due))

        def record() -> tuple[Tensor, Estimates, Estimates]:
            with torch.enable_grad():
                # Estimates from first derivatives find the loss by the name of torch's operator.
                corrections = Corrections(lean=True) if self.second_order else nullcontext()
                with corrections, noting_operands(self):
                    loss = shards.returned()
                require_loss(self.caller, loss)
                joint = shards.joint(loss)
            require_finite(self.caller, "losses", [joint.detach()])
            reached = shards.reached(joint)
            wanted = [p for p in reached if id(p) in own]
            others = shards.others(joint) if gradients else []
            whole = self.second_order and len(wanted) == len(reached) and not others
            estimates, found = self._estimated(joint, wanted, whole) if wanted else ([], [])
            if gradients and not whole:
                leaves = [*shards.leaves_of(reached), *(leaf for _, leaf in others)]
                trained = [*reached, *(p for p, _ in others)]
                # A checkpoint's graph leads to all parameters that the part reaches, used or not.
                pulled = torch.autograd.grad(joint, leaves, allow_unused=True)
                found = [(p, g) for p, g in zip(trained, pulled, strict=True) if g is not None]
            return loss, estimates, found

        self._closure_on_shards = shards
        try:
            loss, estimates, found = shards.recorded(record)
        finally:
            self._closure_on_shards = None
        if gradients:
            self.clear_gradients()
            # A backward pass runs all hooks, and adds to the gradients of other parameters.
            torch.autograd.backward([p for p, _ in found], [shards.like(p, g) for p, g in found])
        joined = {id(p): shards.like(p, h) if isinstance(h, Tensor) else h for p, h in estimates}
        return detached(loss), joined

    def _require_closure(self) -> InputError:
        return InputError(
            f"{self.caller}: step: expected step(closure) for sharded parameters when curvature is due, because torch "
            "cannot differentiate the backward pass of fully_shard, got gradients alone; pass a closure that returns "
            "the loss and does not call backward, or pass it to update_curvature before the backward pass."
        )
