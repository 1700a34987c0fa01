"""Calls of solvers on plain tensors, below all transforms, separately for each element of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.authoring.closures import watched
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.legacy_batching import any_legacy_batched, with_batches, without_batches
from hodiff.torch_internals.autograd.transforms import in_transform

Tensors = Sequence[Tensor]


class Job(Protocol):
    """Computation on plain tensors."""

    @property
    def caller(self) -> str:
        """Name of the public function, for messages."""

    def run(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Run on plain tensors, which are constants, and return new tensors."""

    def batched(self, in_dims: Sequence[int | None], size: int, leaves: Tensors) -> tuple[Job, Tensors] | None:
        """Return the job of a whole batch with its arguments, or None if each element is a separate job."""


class SolverCall(Function):
    """Function that runs a job below all transforms. It saves nothing, as its results are constants."""

    @staticmethod
    def forward(job: Job, transformed: bool, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run on constants, with recording on, as solvers may compute gradients."""
        if any_legacy_batched(leaves):
            plain, dims = without_batches(leaves)
            size = next(each.shape[0] for each, dim in zip(plain, dims, strict=True) if dim is not None)
            return with_batches(_each(job, transformed, dims, size, plain))
        constants = tuple(each.detach() for each in leaves)
        run: Callable[[Tensors], tuple[Tensor, ...]] = job.run
        with torch.enable_grad():
            return watched(job.caller, run, constants) if transformed else run(constants)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Declare the results constants."""
        del inputs
        ctx.mark_non_differentiable(*output)
        ctx.outputs = len(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return no gradients."""
        del cotangents
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Return no tangents."""
        del tangents
        return (None,) * ctx.outputs

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], job: Job, transformed: bool, *leaves: Tensor
    ) -> tuple[tuple[Tensor, ...], int]:
        """Run each element separately, unless the job supports the batch."""
        return _each(job, transformed, in_dims[2:], info.batch_size, leaves), 0


def _each(job: Job, transformed: bool, dims: Sequence[int | None], size: int, leaves: Tensors) -> tuple[Tensor, ...]:
    """Compute results for every element of a batch, along the first dimension."""
    taken = job.batched(dims, size, leaves)
    if taken is not None:
        return SolverCall.apply(taken[0], transformed, *taken[1])
    found = [
        SolverCall.apply(
            job,
            transformed,
            *(each if dim is None else each.select(dim, i) for each, dim in zip(leaves, dims, strict=True)),
        )
        for i in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def call_solver(job: Job, leaves: Tensors) -> tuple[Tensor, ...]:
    """Return the results of a job, as constants, for arguments at any level of any transform."""
    return SolverCall.apply(job, in_transform(), *leaves)
