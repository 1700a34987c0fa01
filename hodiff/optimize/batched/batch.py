"""Unknowns of many problems as a pytree and as vectors, and the function mapped over all problems.

Bounds of many problems: equal for all problems, or a row for each problem.

Arguments of many problems: some have a slice for each problem, all problems share the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from hodiff.common.complex_numbers import as_real
from hodiff.common.options import is_int
from hodiff.common.trees import PyTree, describe, flatten_primals, leaf_names, recordable, unflatten
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space
from hodiff.optimize.batched.running_rows import Rows
from hodiff.optimize.bounds import bounds_of
from hodiff.optimize.variables import Variables, require_some

# An int for all arguments, or a tuple with an entry for each argument; None if all problems share an argument.
InDims = int | None | tuple[int | None, ...]


class Arguments:
    """Further arguments of a function, for the problems that still run.

    Args:
        caller: Name of the public function, for messages.
        args: Arguments as the user passed them.
        in_dims: Dimension of the problems in each argument, as for `torch.func.vmap`.
        count: Number of problems.
    """

    def __init__(self, caller: str, args: tuple[Any, ...], in_dims: InDims, count: int):
        self.leaves: list[Any] = []
        self.dims: list[int | None] = []
        for position, (arg, dim) in enumerate(zip(args, _of_each(caller, in_dims, len(args)), strict=True)):
            for name, leaf in zip(leaf_names(arg), pytree.tree_leaves(arg), strict=True):
                if isinstance(leaf, Tensor):
                    leaf = recordable(leaf)
                    if dim is not None:
                        leaf = _rows_first(caller, f"args[{position}]{name}", leaf, dim, count)
                self.leaves.append(leaf)
                self.dims.append(None if dim is None or not isinstance(leaf, Tensor) else 0)
        self._spec = pytree.tree_structure(args)

    def tree(self, leaves: list[Any]) -> Any:
        """Rebuild one problem's arguments from leaves."""
        return pytree.tree_unflatten(leaves, self._spec)

    def retain(self, keep: Tensor) -> None:
        """Drop the slices of problems that are not in the mask `keep`."""
        self.leaves = [
            leaf if dim is None else leaf[keep.to(leaf.device)]
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]


def _of_each(caller: str, in_dims: InDims, number: int) -> tuple[int | None, ...]:
    dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * number
    if len(dims) != number or not all(dim is None or is_int(dim) for dim in dims):
        raise InputError(
            f"{caller}: in_dims: expected an int or None, or a tuple of them for the {number} arguments after x0, got "
            f"{in_dims!r}."
        )
    return dims


def _rows_first(caller: str, name: str, leaf: Tensor, dim: int, count: int) -> Tensor:
    if not -leaf.dim() <= dim < leaf.dim() or leaf.shape[dim] != count:
        raise InputError(
            f"{caller}: {name}: expected {count} in dimension {dim}, a slice for each problem, got {describe(leaf)}; "
            "pass in_dims with None for an argument that all problems share."
        )
    return leaf.detach().movedim(dim, 0)


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
                f"{caller}: x0: expected leaves with the problems along their first dimension, got {shapes}; with "
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


@dataclass
class Box(Rows):
    """Lower and upper bounds, (b, n)."""

    lower: Tensor
    upper: Tensor

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point within the bounds."""
        return x.maximum(self.lower).minimum(self.upper)

    def holds(self, x: Tensor, direction: Tensor) -> Tensor:
        """Mark the unknowns that are at a bound and would cross it along the direction."""
        return ((x <= self.lower) & (direction < 0)) | ((x >= self.upper) & (direction > 0))

    def active(self, x: Tensor) -> Tensor:
        """Return -1 at lower bounds, 1 at upper bounds and 0 elsewhere, like SciPy's `active_mask`."""
        return (x >= self.upper).to(x.dtype) - (x <= self.lower).to(x.dtype)


def box_of(caller: str, bounds: Any, batch: Batch, *, in_pairs: bool = True) -> Box | None:
    """Convert bounds of one problem, or with a row for each, to a `Box`; None for no bounds."""
    if bounds is None:
        return None
    sides = bounds if isinstance(bounds, tuple) and len(bounds) == 2 else (None, None)
    rows = [_rows(side, batch) for side in sides]
    # A side that is not given row by row applies to all problems.
    shared: Any = bounds
    if any(row is not None for row in rows):
        shared = tuple(None if row is not None else side for row, side in zip(rows, sides, strict=True))
    found = bounds_of(caller, shared, Variables(batch.first), in_pairs=in_pairs)
    lower, upper = (
        row if row is not None else torch.as_tensor(side.copy(), device="cpu").to(batch.start).expand_as(batch.start)
        for row, side in zip(rows, (found.lb, found.ub), strict=True)
    )
    if bool((crossed := ~(lower <= upper)).any()):
        problem, i = map(int, crossed.nonzero()[0])
        raise InputError(
            f"{caller}: bounds: expected lower bounds that are at most the upper bounds, got {lower[problem, i]:g} and "
            f"{upper[problem, i]:g} for element {i} of problem {problem}, in pytree order."
        )
    return Box(lower.contiguous(), upper.contiguous())


def _rows(side: Any, batch: Batch) -> Tensor | None:
    """Return one side as rows (B, n), or None if its structure is not that of `x0`."""
    return batch.vectors(side) if batch.is_like(side) else None
