"""Base class of optimizers for the mean loss of several ranks: exchange of numbers, and averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hodiff.distributed.layouts import Layout, is_distributed
from hodiff.distributed.vectors import reduce_over
from hodiff.errors import InputError
from hodiff.optim.ranks import ALONE, Ranks, Replicas, code_of, differ, mark_of
from hodiff.torch_internals.process_groups import is_sharded


class JointOptimizer(Optimizer):
    """Optimizer for the mean loss of the ranks of a process group, or of a single rank."""

    # Ranks over which losses are averaged.
    _ranks: Ranks = ALONE
    _replicas: Replicas
    # Number of calls of `exchanged`.
    _exchanges = 0

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._require_no_module(params)
        super().__init__(params, defaults)

    def _require_no_module(self, params: Any) -> None:
        if isinstance(params, nn.Module):
            raise InputError(
                f"{self.caller}: params: expected parameters, got the module {type(params).__name__}; pass "
                "model.parameters()."
            )

    @property
    def caller(self) -> str:
        """Name of the optimizer in error messages."""
        return type(self).__name__

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups that require a gradient."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def all_parameters(self) -> list[Tensor]:
        """Return the parameters of all groups, also frozen ones."""
        return [p for group in self.param_groups for p in group["params"]]

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters to None, also of frozen ones, for which no closure computes gradients."""
        for parameter in self.all_parameters():
            parameter.grad = None

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return self.all_parameters()[0].device

    @property
    def sharded(self) -> bool:
        """Whether parameters are DTensors over several ranks, or over a process group of one."""
        first = [p for group in self.param_groups[:1] for p in group["params"][:1]]
        return any(is_sharded(p) or (self._ranks.group is not None and is_distributed(p)) for p in first)

    def agree(self, require: Callable[[], object]) -> None:
        """Run a check of this rank's numbers; raise on all ranks if it raises on one, where ranks' numbers differ."""
        if not self.sharded or self._ranks.size == 1:
            require()
            return
        _, error = self._ranks.attempt(require)
        self._ranks.exchange(self.caller, error, [], self.device)

    def total(self, parameters: Sequence[Tensor], numbers: Sequence[float]) -> float:
        """Add up a number of each parameter, and of all its shards."""
        if not self.sharded:
            return sum(numbers)
        layouts = list(map(Layout.of, parameters))
        own = sum(number / layout.copies for number, layout in zip(numbers, layouts, strict=True))
        mesh = layouts[0].mesh
        return float(reduce_over(mesh, torch.tensor([own], dtype=torch.float64, device=mesh.device_type)))

    def exchanged(self, error: Exception | None, loss: Any, *more: float) -> Tensor:
        """Exchange errors, losses and marks of parameters and gradients with the other ranks.

        Args:
            error: Error of this rank, if any.
            loss: Loss of this rank, or None.
            *more: Further numbers.

        Returns:
            Matrix with a row for each rank: the loss, code of the parameters with gradients, mark of gradients, and
            further numbers.

        Raises:
            InputError: If any rank has an error, or their parameters differ.
        """
        self._exchanges += 1
        parameters = self.parameters()
        numbers = [0.0] * 5
        if error is None:
            have = [i for i, p in enumerate(parameters) if p.grad is not None]
            gradients = [parameters[i].grad for i in have]
            number = float(loss) if isinstance(loss, Tensor) else 0.0
            numbers = [number, float(loss is None), code_of(have), 0.0, 0.0]
            # Shards differ, and `fully_shard` has averaged their gradients.
            if not self.sharded:
                numbers[3] = mark_of([g for g in gradients if g is not None])
                # Powers of two: parameters differ from the start, or by a mistake that stays.
                numbers[4] = 0.0 if self._exchanges & (self._exchanges - 1) else mark_of(parameters)
        rows = self._ranks.exchange(self.caller, error, [*numbers, *more], self.device)
        self.require_equal(rows[:, 4:5])
        if differ(rows[:, 1:2]):
            raise InputError(
                f"{self.caller}: step: expected a closure on all ranks or on none, got one on some of the ranks."
            )
        return torch.cat([rows[:, :1], rows[:, 2:4], rows[:, 5:]], dim=1)

    def require_equal(self, marks: Tensor) -> None:
        """Raise unless the marks of all ranks' parameters are equal."""
        if differ(marks):
            raise InputError(
                f"{self.caller}: process_group: expected equal parameters on all ranks, got different ones, "
                + (
                    "although they agreed at the first step; step on all ranks with the same settings, such as the "
                    "learning rate, and write to parameters on all ranks alike."
                    if self._exchanges > 1
                    else "from the first step on; broadcast the parameters of one rank before training, as "
                    "DistributedDataParallel does."
                )
            )

    def average_gradients(self, rows: Tensor) -> None:
        """Average gradients over the ranks, unless DistributedDataParallel or `fully_shard` did so.

        Args:
            rows: Result of `exchanged`.
        """
        if self.sharded:
            return
        parameters = self.parameters()
        if differ(rows[:, 1:2]):
            # A parameter without gradient on this rank only does not occur in its loss.
            found = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
            self._ranks.sum_([found])
            for parameter, number in zip(parameters, found.tolist(), strict=True):
                if number and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        if differ(rows[:, 1:3]):
            self._ranks.mean_([p.grad for p in parameters if p.grad is not None])

    @staticmethod
    def mean_loss(loss: Any, rows: Tensor) -> Any:
        """Return the mean of the ranks' losses, or None without losses."""
        return None if loss is None else torch.full_like(loss, float(rows[:, 0].mean()))

    def _watch(self, found: Sequence[Tensor], loss: float) -> None:
        """Raise if other ranks train the same model with other data, without a process group."""
        # Optimizers from older pickles have no notes.
        if "_replicas" not in vars(self):
            self._replicas = Replicas()
        self._replicas.watch(
            self.caller,
            self.parameters(),
            [each for each in found if each.is_floating_point() or each.is_complex()],
            loss,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ranks": self._ranks}
