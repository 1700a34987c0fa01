"""Calls of solvers on plain tensors, below all transforms, separately for each element of a batch.

Conversion of pytrees of tensors to vectors for solvers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree

from hodiff.authoring.closures import watched
from hodiff.common.trees import PyTree, describe, leaf_names
from hodiff.errors import InputError
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.batching import (
    any_legacy_batched,
    call_below_legacy_batch,
    random_operators_allowed,
)
from hodiff.torch_internals.autograd.transforms import in_transform


class Ravel:
    """Conversion of a tree of real tensors to vectors of the promoted dtype, and back."""

    def __init__(self, tree: PyTree):
        self.like, self.spec = pytree.tree_flatten(tree)
        self.shapes = [each.shape for each in self.like]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)
        self.dtype = self.like[0].dtype
        for each in self.like[1:]:
            self.dtype = torch.promote_types(self.dtype, each.dtype)

    def vector(self, tree: PyTree) -> Tensor:
        """Join all elements to one vector."""
        return torch.cat([each.reshape(-1).to(self.dtype) for each in pytree.tree_leaves(tree)])

    def tree(self, vector: Tensor) -> PyTree:
        """Convert a vector to a tree, the inverse of `vector`."""
        return self.spec.unflatten([
            part.reshape(shape).to(each.dtype)
            for part, shape, each in zip(vector.split(self.sizes), self.shapes, self.like, strict=True)
        ])

    def residual(self, tree: PyTree, solver: str) -> Tensor:
        """Return the vector of a residual for a solver for roots, after a check for one equation per unknown."""
        leaves = pytree.tree_leaves(tree)
        shapes = [each.shape if isinstance(each, Tensor) else None for each in leaves]
        if shapes != self.shapes:
            remedy = "there must be as many equations as unknowns, in the structure of x0"
            if shapes == [()]:
                remedy += f"; to minimise by argmin, pass stationary({solver}()) as its solver"
            self.require_same(tree, f"{solver}: residual: result", remedy)
        return self.vector(leaves)

    def require_same(self, tree: PyTree, where: str, remedy: str) -> list[Tensor]:
        """Return the leaves of a user's result, which must have this structure, these shapes and dtypes."""
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self.spec:
            raise InputError(
                f"{where}: expected the structure of x0, {_outline(self.like, self.spec)}, "
                f"got {_outline(leaves, spec)}; {remedy}."
            )
        for index, (leaf, like) in enumerate(zip(leaves, self.like, strict=True)):
            if not isinstance(leaf, Tensor) or leaf.shape != like.shape or leaf.dtype != like.dtype:
                raise InputError(
                    f"{where}{leaf_names(tree)[index]}: expected {describe(like)}, got {describe(leaf)}; {remedy}."
                )
        return leaves


def _outline(leaves: list[Any], spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return f"a bare {type(leaves[0]).__name__}"
    return str(spec.unflatten([type(each).__name__ for each in leaves])).replace("'", "")


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
        constants = tuple(each.detach() for each in leaves)
        run: Callable[[Tensors], tuple[Tensor, ...]] = job.run
        with torch.enable_grad(), random_operators_allowed():
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
    if any_legacy_batched(leaves):
        return call_below_legacy_batch(lambda *leaves: call_solver(job, leaves), leaves)
    return SolverCall.apply(job, in_transform(), *leaves)
