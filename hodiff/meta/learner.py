"""Base class of the meta-learners: a module's loss on many tasks at once, and their joint inner loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from hodiff.common.chunks import spans
from hodiff.common.module_state import at_another_point, buffers_unwrapped, functional_call
from hodiff.common.options import require_bools, require_callable, require_choice, require_generator, require_int
from hodiff.common.randomness import drawn_seed, seeded
from hodiff.common.trees import describe
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.meta.adaptation import GRADIENTS, Adaptation, adapt
from hodiff.meta.batch_norms import POLICIES, average, frozen_norms, joined, moving_statistics, stacked
from hodiff.meta.inner_gradients import clipped, require_norm
from hodiff.meta.optimizer import Optimizer, Setting, require_optimizer
from hodiff.meta.sgd import SGD
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.threads import one_thread_at_a_time
from hodiff.torch_internals.wording import Wording, says

Parameters = dict[str, Tensor]
# Inputs and targets, with the tasks along the first dimension.
Batch = tuple[Tensor, Tensor]


class MetaLearner(nn.Module):
    """Base class of the meta-learners; a subclass defines the function to minimise over tasks.

    Tasks are a tuple of tensors with the tasks along the first dimension, `(support_x, support_y, query_x, query_y)`,
    or a list of such tuples without that dimension, whose shapes may differ. Tasks of equal shapes go through the
    module together: their inner loops are one inner loop on the sum of their losses, whose gradients are separate for
    each task.

    Attributes:
        module: User's module, whose trainable parameters are the meta-parameters.
        names: Names of the adapted parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        lr: Setting = 0.01,
        steps: int = 1,
        *,
        optimizer: Optimizer | None = None,
        checkpoint: int | None = None,
        truncate: int | None = None,
        clip: float | Tensor | None = None,
        route: str = "auto",
        batch_norm: str = "per-task",
        chunk_size: int | None = None,
        generator: torch.Generator | None = None,
        check_finite: bool = True,
        first_order: bool = False,
    ):
        super().__init__()
        caller = type(self).__name__
        require_int(caller, "checkpoint", checkpoint, 1, optional=True)
        require_int(caller, "truncate", truncate, 0, optional=True)
        require_norm(caller, "clip", clip)
        require_choice(caller, "route", route, GRADIENTS)
        require_choice(caller, "batch_norm", batch_norm, POLICIES)
        require_int(caller, "chunk_size", chunk_size, 1, optional=True)
        require_generator(caller, "generator", generator)
        require_bools(caller, check_finite=check_finite, first_order=first_order)
        if not isinstance(module, nn.Module):
            raise InputError(f"{caller}: module: expected an nn.Module, got {describe(module)}.")
        require_callable(caller, loss=loss)
        require_int(caller, "steps", steps, 0)
        # Choose the names now: under torch.func, tangents and replaced parameters do not show whether they require a
        # gradient.
        self.names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if not self.names:
            raise InputError(f"{caller}: module: expected parameters that require gradients, got none.")
        self.module, self.loss, self.steps = module, loss, steps
        self.set_optimizer(lr, optimizer)
        self.batch_norm, self.chunk_size = batch_norm, chunk_size
        # Options of `adapt`.
        self.options: dict[str, Any] = {
            "checkpoint": checkpoint,
            "truncate": truncate,
            "clip": None if clip is None else partial(_clip_each, clip),
            "route": route,
            "generator": generator,
            "check_finite": check_finite,
            "first_order": first_order,
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call with the generator's random numbers, in inner loops and in query losses."""
        generator = self.options["generator"]
        with nullcontext() if generator is None else seeded(drawn_seed(generator), list(self.parameters())):
            return super().__call__(*args, **kwargs)

    @leave_inference_mode
    def adapt(self, support: Batch, steps: int | None = None) -> Parameters:
        """Adapt to one task.

        Args:
            support: Inputs and targets of the task.
            steps: Number of steps, by default that of training.

        Returns:
            Adapted parameters by name, for `torch.func.functional_call(module, params, inputs)`.
        """
        batch = (support[0].unsqueeze(0), support[1].unsqueeze(0))
        return {name: each[0] for name, each in self.adapt_all(batch, steps).params.items()}

    @leave_inference_mode
    def adapt_all(
        self,
        support: Batch,
        steps: int | None = None,
        start: Parameters | None = None,
        constants: Parameters | None = None,
    ) -> Adaptation:
        """Adapt to several tasks of equal shapes, separately.

        Args:
            support: Inputs and targets, with tasks along the first dimension.
            steps: Number of steps, by default that of training.
            start: Start of each task, along the first dimension; by default `adapted_parameters()` for all.
            constants: Replacements of the module's other parameters, with tasks along the first dimension.

        Returns:
            Adapted parameters and buffers, with tasks along the first dimension.
        """
        tasks = len(support[0])
        start = self.starts(tasks) if start is None else start
        # Parameters that carry no derivative from step to step may be passed as buffers.
        buffers = {**stacked(moving_statistics(self.module, self.batch_norm), tasks), **(constants or {})}
        steps = self.steps if steps is None else steps
        optimizer = self.make_optimizer()
        # Check without the dimension of tasks: a tensor with as many numbers as tasks would be a rate for each task.
        optimizer.require_fit(self.adapted_parameters())
        total = self.make_inner_loss(start)
        return adapt(total, start, support, optimizer, steps, buffers=buffers, history=True, **self.options)

    def starts(self, tasks: int) -> Parameters:
        """Return the parameters before adaptation, repeated along a first dimension of tasks."""
        return {name: each.expand(tasks, *each.shape) for name, each in self.adapted_parameters().items()}

    def adapted_parameters(self) -> Parameters:
        """Return the parameters that are adapted, before adaptation."""
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name] for name in self.names}

    def set_optimizer(self, lr: Setting, optimizer: Optimizer | None) -> None:
        """Store the optimizer of the inner steps, by default gradient descent."""
        if optimizer is not None:
            require_optimizer(type(self).__name__, optimizer)
        self.inner_optimizer = SGD(lr) if optimizer is None else optimizer

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer of the inner steps."""
        return self.inner_optimizer

    def make_inner_loss(self, start: Parameters) -> Callable[..., tuple[Tensor, Parameters]]:
        """Return the sum of the tasks' losses as a function of (params, batch, buffers), given their starts."""
        del start

        def total(params: Parameters, batch: Batch, buffers: Parameters) -> tuple[Tensor, Parameters]:
            losses, buffers = self.losses(params, batch, buffers)
            return losses.sum(), buffers

        return total

    @at_another_point
    def losses(self, params: Parameters, batch: Batch, buffers: Parameters) -> tuple[Tensor, Parameters]:
        """Compute the loss of each task, and the buffers after its forward pass."""
        counters = {name: each for name, each in buffers.items() if not each.is_floating_point()}
        moving = {name: each for name, each in buffers.items() if each.is_floating_point()}

        def one(params: Parameters, batch: Batch, moving: Parameters) -> tuple[Tensor, Parameters]:
            # Both contexts change the module during the call.
            with one_thread_at_a_time(), frozen_norms(self.module, self.batch_norm):
                prediction = functional_call(self.module, {**params, **moving, **counters}, (batch[0],))
            value = self.loss(prediction, batch[1])
            if not (isinstance(value, Tensor) and value.shape == () and value.is_floating_point()):
                raise InputError(
                    f"{type(self).__name__}: loss: expected a function that returns a real tensor of shape () for one "
                    f"task, got {describe(value)}; reduce it with .sum() or .mean()."
                )
            return value, moving

        with buffers_unwrapped(self.module.modules()):
            try:
                losses, moving = vmap(one, randomness="different")(params, batch, moving)
            except RuntimeError as error:
                if not says(error, Wording.BATCHING):
                    raise
                # Modules that torch cannot batch, such as spectral norm in training, process one task after another.
                found = [one(*pytree.tree_map(itemgetter(i), (params, batch, moving))) for i in range(len(batch[0]))]
                losses, moving = pytree.tree_map(lambda *each: torch.stack(each), *found)
        return losses, {**moving, **counters}

    def query_losses(self, support: Batch, query: Batch, kept: list[Parameters] | None = None) -> Tensor:
        """Adapt to some tasks and compute their query losses; append buffers to `kept`, or store them at once."""
        adapted = self.adapt_all(support)
        with Corrections():
            losses, buffers = self.losses(adapted.params, query, adapted.buffers)
        if kept is None:
            self.keep_statistics([buffers])
        else:
            kept.append(buffers)
        self.require_reach(losses)
        return losses

    def keep_statistics(self, kept: Sequence[Parameters]) -> None:
        """Set the module's running statistics to the mean over all tasks, if the policy is "shared".

        Call it after the last chunk: all chunks start from the same statistics, so the result does not depend on
        chunks.
        """
        if self.batch_norm == "shared" and kept and kept[0]:
            own = dict(self.module.named_buffers())
            for name, each in average(joined(kept)).items():
                own[name].copy_(each.detach())

    def require_reach(self, losses: Tensor) -> None:
        """Raise if no parameter can change a query loss."""
        recorded = only_reverse_mode() and torch.is_grad_enabled()
        if recorded and not losses.requires_grad and any(p.requires_grad for p in self.adapted_parameters().values()):
            raise InputError(
                f"{type(self).__name__}: loss: expected a query loss that depends on the parameters, got one that "
                "does not; look for .detach(), .item(), torch.no_grad() in the loss."
            )

    def chunks(self, tasks: Any, parts: int = 4) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over groups of tasks of equal shapes, with tasks along the first dimension."""
        if isinstance(tasks, list):
            for number, task in enumerate(tasks):
                yield tuple(each.unsqueeze(0) for each in self._validated(task, parts, f"tasks[{number}]"))
            if not tasks:
                raise InputError(f"{type(self).__name__}: tasks: expected at least one task, got none.")
            return
        tensors = self._validated(tasks, parts, "tasks")
        counts = [len(each) if each.dim() else 0 for each in tensors]
        if len(set(counts)) != 1 or not counts[0]:
            raise InputError(
                f"{type(self).__name__}: tasks: expected tensors with the same number of tasks (at least one) in the "
                f"first dimension, got {', '.join(map(describe, tensors))}; pass a list of tuples if shapes differ."
            )
        for start, stop in spans(counts[0], self.chunk_size or counts[0]):
            yield tuple(each[start:stop] for each in tensors)

    def _validated(self, task: Any, parts: int, name: str) -> Sequence[Tensor]:
        if not (isinstance(task, tuple) and len(task) >= parts and all(isinstance(each, Tensor) for each in task)):
            wanted = ("support_x", "support_y", "query_x", "query_y")[:parts]
            got = f"{len(task)} parts" if isinstance(task, tuple) else describe(task)
            raise InputError(f"{type(self).__name__}: {name}: expected a tuple ({', '.join(wanted)}), got {got}.")
        return task[:parts]


def _clip_each(norm: Any, tree: Parameters) -> Parameters:
    """Clip the gradients of each task separately; tasks are along the first dimension."""
    return vmap(lambda tree: dict(zip(tree, clipped(list(tree.values()), norm), strict=True)))(tree)
