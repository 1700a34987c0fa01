"""Arguments of many problems: some have a slice for each problem, all problems share the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import is_int
from hodiff.common.trees import describe, leaf_names, recordable
from hodiff.errors import InputError

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
            f"{caller}: in_dims: expected an int or None, or a tuple of them for the {number} arguments behind x0, got "
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
