"""Unknowns of many problems as a pytree and as vectors, and the function mapped over all problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from hodiff.common.complex_numbers import as_real
from hodiff.common.trees import PyTree, describe, flatten_primals, recordable, unflatten
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space
from hodiff.optim.batched.sliced_arguments import Arguments, InDims
from hodiff.optim.variables import require_some


class Batch:
    """Conversion of many problems' unknowns between the caller's pytree and float64 vectors (B, n).

    Attributes:
        space: Space of one problem's unknowns.
        count: Number of problems B.
        start: Starts of all problems, (B, n).
    """

    def __init__(self, caller: str, x0: PyTree):
        leaves, spec = flatten_primals(x0, caller, "x0", complex_too=True)
        if all(leaf.dim() and not len(leaf) for leaf in leaves):
            raise InputError(
                f"{caller}: x0: expected at least one problem along the first dimension, got 0; leave the call out."
            )
        if any(not leaf.dim() or len(leaf) != len(leaves[0]) for leaf in leaves):
            shapes = ", ".join(map(describe, leaves))
            raise InputError(
                f"{caller}: x0: expected leaves whose first dimension is that of the problems, got {shapes}; with "
                "batched=True, stack the starts, torch.stack([...])."
            )
        self.count = len(leaves[0])
        self._x0 = unflatten([recordable(leaf).detach() for leaf in leaves], spec)
        self.space = Space.of(self.first)
        require_some(caller, self.space)
        self.start = self.vectors(self._x0)

    @property
    def first(self) -> PyTree:
        """Start of the first problem."""
        return pytree.tree_map(lambda leaf: leaf[0], self._x0)

    def is_like(self, tree: PyTree) -> bool:
        """Whether a tree has the structure and shapes of `x0`, with a row for each problem."""
        leaves, spec = pytree.tree_flatten(tree)
        own, own_spec = pytree.tree_flatten(self._x0)
        return spec == own_spec and all(
            isinstance(leaf, Tensor) and leaf.shape == one.shape for leaf, one in zip(leaves, own, strict=True)
        )

    def vectors(self, tree: PyTree) -> Tensor:
        """Convert a tree with the structure of `x0` to float64 vectors (B, n)."""
        leaves = [as_real(leaf.detach()) for leaf in pytree.tree_leaves(tree)]
        return self.space.join(leaves, self.count).T.to(torch.float64).contiguous()

    def tree(self, vectors: Tensor) -> PyTree:
        """Convert vectors (B, n) to new tensors in the caller's structure, dtypes and devices."""
        return self.space.tree_of([leaf.clone() for leaf in self.space.split(vectors.T)])


class Mapped:
    """User's function of one problem, mapped over the vectors of the problems that still run."""

    def __init__(self, caller: str, f: Callable[..., Any], batch: Batch, args: tuple[Any, ...], in_dims: InDims):
        self._f, self._space = f, batch.space
        self._arguments = Arguments(caller, args, in_dims, batch.count)

    def retain(self, keep: Tensor) -> None:
        """Drop the arguments of problems that are not in the mask `keep`."""
        self._arguments.retain(keep)

    def over(self, x: Tensor, transform: Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]) -> Any:
        """Map a transform of the function of one vector over the rows of x, (b, n)."""
        arguments = self._arguments

        def at(x: Tensor, leaves: list[Any]) -> Any:
            return transform(lambda x: self._f(self._space.unflatten(x), *arguments.tree(leaves)))(x)

        return vmap(at, in_dims=(0, arguments.dims))(x, arguments.leaves)
