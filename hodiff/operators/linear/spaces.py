"""Vectors in three forms: a pytree, one flat vector, or a block of vectors as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.complex_numbers import as_complex, as_real
from hodiff.common.trees import PyTree, describe, leaf_label, leaf_names, otherwise_arranged, strided
from hodiff.distributed.layouts import is_distributed
from hodiff.distributed.vectors import Shards
from hodiff.errors import InputError


@dataclass(frozen=True, eq=False)
class Space:
    """The vector space of an operator's vectors or products: the form of a pytree's leaves, joined one after another.

    Attributes:
        spec: Structure of the pytree.
        shapes: Shape of each leaf.
        dtypes: Dtype of each leaf.
        device: Device of flat vectors: the device of the first leaf.
        names: Path of each leaf in the pytree.
        joined: Whether each leaf is complex in the pytree; here it is real, with a last dimension of two.
        shards: How the leaves lie on the ranks of a device mesh, if some are DTensors; shapes are then those of the
            local parts, and flat vectors differ between ranks.
    """

    spec: pytree.TreeSpec
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    names: tuple[str, ...] = field(repr=False)
    joined: tuple[bool, ...] = field(repr=False)
    shards: Shards | None = field(default=None, repr=False)

    # Copying or pickling a TreeSpec makes torch warn; a tree of that structure does not.
    def __deepcopy__(self, _: dict[int, Any]) -> Space:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.require_whole("pickle", "operators on ordinary tensors; save the DTensors by torch.distributed.checkpoint")
        tree = pytree.tree_unflatten(list(range(len(self.shapes))), self.spec)
        return _remade, (tree, self.shapes, self.dtypes, self.devices, self.names, self.joined)

    @classmethod
    def of(cls, tree: PyTree, *, caller: str = "", sharded_too: bool = False) -> Space:
        """Return the space of pytrees in the form of this one; raise if it has DTensors, unless they are supported."""
        given, spec = pytree.tree_flatten(tree)
        shards = Shards.of(given)
        if shards is not None and not sharded_too:
            raise InputError(
                f"{caller or 'operator'}: x: expected ordinary tensors, got DTensors, which HessianOperator, "
                "GaussNewtonOperator, FisherOperator and EmpiricalFisherOperator support; use one of them, or "
                "full_tensor() of the parameters."
            )
        if shards is not None:
            given = [shards.local(each.detach(), i) for i, each in enumerate(given)]
        leaves = tuple(map(as_real, given))
        return cls(
            spec,
            tuple(leaf.shape for leaf in leaves),
            tuple(leaf.dtype for leaf in leaves),
            tuple(leaf.device for leaf in leaves),
            tuple(leaf_names(tree)),
            tuple(leaf.is_complex() for leaf in given),
            shards,
        )

    @classmethod
    def flat(cls, size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Space:
        """Return the space of vectors (size,)."""
        return cls.of(torch.empty(size, dtype=dtype, device=device))

    @property
    def labels(self) -> list[str]:
        """The leaves' names with dots, as `block` takes them."""
        return [leaf_label(name) for name in self.names]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each leaf."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """Number of elements of all leaves."""
        return sum(self.sizes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of flat vectors: the leaves' promoted dtype; float32 for 16 bits, so that sums keep their digits."""
        dtype = self.dtypes[0]
        for each in self.dtypes[1:]:
            dtype = torch.promote_types(dtype, each)
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    @property
    def device(self) -> torch.device:
        """Device of flat vectors."""
        return self.devices[0]

    def same(self, other: Space) -> bool:
        """Whether two spaces have the same vectors."""
        if (self.shards is not None or other.shards is not None) and not (
            self.shards and self.shards.same(other.shards)
        ):
            return False
        return (self.spec, self.shapes, self.dtypes, self.devices, self.joined) == (
            other.spec,
            other.shapes,
            other.dtypes,
            other.devices,
            other.joined,
        )

    def is_tree(self, value: Any) -> bool:
        """Whether a value is a pytree, not a flat vector or block; a tensor like the only leaf is a pytree."""
        if not isinstance(value, (Tensor, np.ndarray)):
            return True
        if not isinstance(value, Tensor) or not self.spec.is_leaf():
            return False
        if self.shards is not None:
            return is_distributed(value)
        if self.joined[0]:
            return value.is_complex()
        return value.dim() != 1 and value.shape == self.shapes[0]

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        """Split columns of (n, k) into leaves (k, *shape), each in its own dtype and on its own device."""
        return self.split_rows(block.t())

    def split_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows of (k, n) as `split` splits columns."""
        k = rows.shape[0]
        pieces = (rows,) if len(self.sizes) == 1 else rows.split_with_sizes(self.sizes, 1)
        leaves = [
            piece.reshape(k, *shape).to(device, dtype)
            for piece, shape, dtype, device in zip(pieces, self.shapes, self.dtypes, self.devices, strict=True)
        ]
        # Torch views pairs as complex numbers only at even storage offsets.
        if True not in self.joined:
            return tuple(leaves)
        return tuple(
            leaf.clone(memory_format=torch.contiguous_format) if joined else leaf
            for leaf, joined in zip(leaves, self.joined, strict=True)
        )

    @cached_property
    def is_uniform(self) -> bool:
        """Whether flat vectors are leaves one after another in memory, all real, of one dtype and device, unsharded."""
        one_kind = set(self.dtypes) == {self.dtype} and set(self.devices) == {self.device}
        return one_kind and True not in self.joined and self.shards is None

    def split_vector(self, vector: Tensor) -> list[Tensor]:
        """Split a contiguous vector (n,) of a uniform space into views with the leaves' shapes."""
        pieces = (vector,) if len(self.sizes) == 1 else vector.split_with_sizes(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def join(self, leaves: Sequence[Tensor], count: int, *, out: Tensor | None = None) -> Tensor:
        """Join leaves (k, *shape) as columns of (n, k), in a new tensor or the transpose of `out` (k, n)."""
        # Embeddings with sparse=True have sparse gradients.
        device, dtype = self.device, self.dtype
        rows = [strided(leaf).reshape(count, -1).to(device, dtype) for leaf in leaves]
        return torch.cat(rows, dim=1, out=out).t()

    def flatten(self, tree: PyTree, caller: str = "flatten", name: str = "v") -> Tensor:
        """Flatten a pytree of this space to one vector (n,).

        Args:
            tree: The pytree.
            caller: The public function, for the error message.
            name: The argument, for the error message.

        Returns:
            The vector.

        Raises:
            InputError: If the pytree has another structure, or a leaf another shape.
        """
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self.spec:
            expected, got = set(self.names), set(leaf_names(tree))
            differences = [f"missing {name or 'a tensor'}" for name in sorted(expected - got)]
            differences += [f"unexpected {name or 'a tensor'}" for name in sorted(got - expected)]
            detail = ", ".join(differences[:5]) or otherwise_arranged(self.spec, spec)
            raise InputError(
                f"{caller}: {name} does not have the structure of the operator's vectors: {detail}; pass one tensor "
                f"for each leaf, a flat vector ({self.size},) or a matrix ({self.size}, k)."
            )
        if self.shards is not None:
            leaves = self._local(self.shards, leaves, caller, name)
        for label, inner, joined, leaf in zip(self.names, self.shapes, self.joined, leaves, strict=True):
            shape = inner[:-1] if joined else inner
            if not isinstance(leaf, Tensor) or leaf.shape != shape or leaf.is_complex() != joined:
                raise InputError(
                    f"{caller}: {name} does not match at {label or 'its only leaf'}: expected {tuple(shape)}"
                    f"{' of complex numbers' * joined}, got {describe(leaf)}; create {name} with tensors like each "
                    "leaf, such as by torch.zeros_like."
                )
        return self.join([as_real(leaf)[None] for leaf in leaves], 1)[:, 0]

    def unflatten(self, vector: Tensor) -> PyTree:
        """Return a vector (n,) as a pytree of this space."""
        return self.tree_of([leaf[0] for leaf in self.split(vector[:, None])])

    def tree_of(self, leaves: Sequence[Tensor]) -> PyTree:
        """Return leaves as a pytree, complex where `joined` says so."""
        if self.shards is not None:
            return pytree.tree_unflatten([self.shards.leaf(each, i) for i, each in enumerate(leaves)], self.spec)
        return pytree.tree_unflatten(list(map(as_complex, leaves, self.joined)), self.spec)

    def local_leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the parts of a point's leaves that lie on this rank."""
        return list(leaves) if self.shards is None else [self.shards.local(each, i) for i, each in enumerate(leaves)]

    def require_whole(self, caller: str, remedy: str) -> None:
        """Raise if vectors are sharded over ranks."""
        if self.shards is not None:
            raise InputError(
                f"{caller}: A: expected an operator whose vectors lie on one process, got one on sharded parameters "
                f"({self.shards.count:,} numbers on {self.shards.mesh}); use {remedy}."
            )

    def _local(self, shards: Shards, leaves: Sequence[Any], caller: str, name: str) -> list[Any]:
        for i, (leaf, layout, label) in enumerate(zip(leaves, shards.layouts, self.names, strict=True)):
            if not isinstance(leaf, Tensor) or not shards.fits(leaf, i):
                like = (
                    f"a DTensor {tuple(layout.shape)} on {layout.mesh}"
                    if is_distributed(shards.given[i])
                    else "a tensor"
                )
                raise InputError(
                    f"{caller}: {name} does not match at {label or 'its only leaf'}: expected {like}, got "
                    f"{type(leaf).__name__}; create {name} with tensors like each leaf, such as by torch.zeros_like."
                )
        return self.local_leaves(leaves)

    def select(self, indices: Sequence[int]) -> list[Any]:
        """Return the slices of some leaves in a flat vector."""
        starts = [sum(self.sizes[:index]) for index in indices]
        return [slice(start, start + self.sizes[index]) for index, start in zip(indices, starts, strict=True)]


def _remade(tree: PyTree, *rest: Any) -> Space:
    """Rebuild a space from a pytree of its structure."""
    return Space(pytree.tree_structure(tree), *rest)
