"""The unknowns of many problems, as a pytree and as vectors; and their function, mapped over all of them."""

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
from hodiff.optim.batched.arguments import Arguments, InDims
from hodiff.optim.variables import require_some


class Batch:
    """The unknowns of many problems, between the caller's pytree and float64 vectors (B, n).

    Attributes:
        space: That of one problem's unknowns.
        count: How many problems there are, B.
        start: Where they begin, (B, n).
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
        """The start of the first problem."""
        return pytree.tree_map(lambda leaf: leaf[0], self._x0)

    def is_like(self, tree: PyTree) -> bool:
        """Whether a tree has the structure and the shapes of `x0`, a row for each problem."""
        leaves, spec = pytree.tree_flatten(tree)
        own, own_spec = pytree.tree_flatten(self._x0)
        return spec == own_spec and all(
            isinstance(leaf, Tensor) and leaf.shape == one.shape for leaf, one in zip(leaves, own, strict=True)
        )

    def vectors(self, tree: PyTree) -> Tensor:
        """A tree like `x0` as float64 vectors (B, n)."""
        leaves = [as_real(leaf.detach()) for leaf in pytree.tree_leaves(tree)]
        return self.space.join(leaves, self.count).T.to(torch.float64).contiguous()

    def tree(self, vectors: Tensor) -> PyTree:
        """Vectors (B, n) in the caller's structure, dtypes and devices, tensors of their own."""
        return self.space.tree_of([leaf.clone() for leaf in self.space.split(vectors.T)])


class Mapped:
    """The user's function of one problem, for the vectors of those that still run."""

    def __init__(self, caller: str, f: Callable[..., Any], batch: Batch, args: tuple[Any, ...], in_dims: InDims):
        self._f, self._space = f, batch.space
        self._arguments = Arguments(caller, args, in_dims, batch.count)

    def retain(self, keep: Tensor) -> None:
        """Forget the others."""
        self._arguments.retain(keep)

    def over(self, x: Tensor, transform: Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]) -> Any:
        """What a transform of the function of one vector gives at each row of (b, n)."""
        arguments = self._arguments

        def at(x: Tensor, leaves: list[Any]) -> Any:
            return transform(lambda x: self._f(self._space.unflatten(x), *arguments.tree(leaves)))(x)

        return vmap(at, in_dims=(0, arguments.dims))(x, arguments.leaves)
