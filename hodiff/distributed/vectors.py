"""Vectors whose parts lie on different ranks: inner products, norms and random draws over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.distributed.exchanges import exchanging
from hodiff.distributed.layouts import Layout, any_distributed, is_distributed, layout_of
from hodiff.distributed.linear_maps import as_dtensor, as_local
from hodiff.errors import InputError


def reduce_over(mesh: Any, tensor: Tensor, operation: str = "SUM") -> Tensor:
    """Reduce a tensor over all ranks of a mesh, in place."""
    with exchanging("adding up the numbers of ranks"):
        for dim in range(mesh.ndim):
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation), group=mesh.get_group(dim))
    return tensor


@dataclass(frozen=True, eq=False)
class Shards:
    """The leaves of a sharded vector: flat vectors hold the local part of each leaf, one after another.

    Attributes:
        mesh: The device mesh of all leaves; some may lie on a part of it.
        layouts: The layout of each leaf; ordinary tensors count as replicated.
        given: The leaves of the tree from which the space was made.
    """

    mesh: Any
    layouts: tuple[Layout, ...]
    given: tuple[Any, ...] = field(repr=False)

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Shards | None:
        """Return the shards of a tree's leaves, or None if no leaf is a DTensor."""
        if not any_distributed(leaves):
            return None
        laid = [layout_of(each, "operator", f"leaf {i}") for i, each in enumerate(leaves) if is_distributed(each)]
        mesh = max((each.mesh for each in laid), key=lambda each: each.size())
        ranks = set(mesh.mesh.flatten().tolist())
        for each in laid:
            if not set(each.mesh.mesh.flatten().tolist()) <= ranks:
                raise InputError(
                    f"operator: x: expected DTensors on one device mesh or parts of it, got {mesh} and {each.mesh}; "
                    "distribute all parameters over one mesh, with Replicate on dimensions that do not shard them."
                )
        layouts = tuple(
            Layout.of(each) if is_distributed(each) else Layout.replicated(mesh, each.shape) for each in leaves
        )
        if any(each.is_complex() for each in leaves):
            raise InputError(
                "operator: x: expected real DTensors, got complex ones; pass torch.view_as_real of the parameters."
            )
        return cls(mesh, layouts, tuple(getattr(each, "stands_for", each) for each in leaves))

    def same(self, other: Shards | None) -> bool:
        """Whether another space has its parts on the same ranks."""
        return other is not None and self.layouts == other.layouts

    def local(self, leaf: Any, index: int) -> Tensor:
        """Return the local part of a leaf."""
        return as_local(leaf, self.layouts[index]) if is_distributed(leaf) else leaf

    def fits(self, leaf: Any, index: int) -> bool:
        """Whether a leaf of a vector is distributed like the leaf of the space."""
        expected = is_distributed(self.given[index])
        if is_distributed(leaf) != expected:
            return False
        return not expected or (
            leaf.device_mesh == self.layouts[index].mesh and leaf.shape == self.layouts[index].shape
        )

    def leaf(self, local: Tensor, index: int) -> Any:
        """Return a local part as a leaf of the tree; code that receives it may ask which leaf it stands for."""
        if not is_distributed(self.given[index]):
            return local
        leaf = as_dtensor(local, self.layouts[index])
        leaf.stands_for = self.given[index]
        return leaf

    @property
    def count(self) -> int:
        """Number of elements of the whole vector."""
        return sum(layout.shape.numel() for layout in self.layouts)

    def weights(self, sizes: Sequence[int], like: Tensor) -> Tensor:
        """Return the share with which each local element counts, so that replicated elements count once: (n, 1)."""
        # A tensor on a part of the mesh has a copy on every other part.
        shares = [layout.mesh.size() / (self.mesh.size() * layout.copies) for layout in self.layouts]
        parts = [like.new_full((size,), share) for size, share in zip(sizes, shares, strict=True)]
        return torch.cat([like.new_zeros(0), *parts])[:, None]

    def draw(self, random: Callable[[int], Tensor]) -> Tensor:
        """Draw a flat vector: every rank draws all numbers of a leaf, and keeps its own."""
        parts = []
        for layout in self.layouts:
            whole = layout.dtensor(random(layout.shape.numel()).view(layout.shape), layout.everywhere)
            parts.append(whole.redistribute(placements=layout.placements).to_local().reshape(-1))
        return torch.cat(parts)

    def units(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return this rank's part of the unit vectors `start` to `stop` of the whole space, as columns."""
        columns = []
        for index in range(start, stop):
            ends = iter(torch.tensor([0, *(layout.shape.numel() for layout in self.layouts)]).cumsum(0).tolist())

            def one_hot(count: int, index: int = index, ends: Iterator[int] = ends) -> Tensor:
                leaf, place = like.new_zeros(count), index - next(ends)
                if 0 <= place < count:
                    leaf[place] = 1
                return leaf

            columns.append(self.draw(one_hot))
        return torch.stack(columns, 1)

    def leaves(self, block: Tensor, shapes: Sequence[torch.Size]) -> list[Any]:
        """Return the columns of a block (n, k) as one DTensor (k, *shape) for each leaf, given its local shape."""
        parts = block.detach().t().split([shape.numel() for shape in shapes], 1)
        return [
            layout.batched(block.shape[1]).dtensor(part.reshape(len(part), *shape))
            for layout, part, shape in zip(self.layouts, parts, shapes, strict=True)
        ]

    def whole(self, block: Tensor, shapes: Sequence[torch.Size]) -> Tensor:
        """Gather the columns of a block on every rank, (count, k)."""
        with exchanging("gathering a vector"):
            rows = [each.full_tensor().reshape(block.shape[1], -1) for each in self.leaves(block, shapes)]
        return torch.cat(rows, 1).t()

    def _copied(self, layout: Layout) -> list[tuple[Any, int]]:
        """Return the dimensions of meshes along which ranks have the same part of a leaf."""
        own = [(layout.mesh, i) for i, each in enumerate(layout.placements) if each.is_replicate()]
        if layout.mesh.size() == self.mesh.size():
            return own
        names, inner = self.mesh.mesh_dim_names or (), layout.mesh.mesh_dim_names or ()
        if not inner or not set(inner) <= set(names):
            raise InputError(
                f"operator: x: expected DTensors on a device mesh and parts of it by name, got {self.mesh} and "
                f"{layout.mesh}; create meshes by mesh[name] of one init_device_mesh(..., mesh_dim_names=...)."
            )
        return own + [(self.mesh, i) for i, each in enumerate(names) if each not in inner]

    def factorized(self, block: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        r"""Compute $B = Q R$ with orthonormal columns of Q over all ranks, from the factors R of their parts."""
        # Nearly dependent columns amplify rounding, so only one of the ranks that share a part factorizes it. See
        # Demmel, Grigori, Hoemmen, Langou, "Communication-optimal parallel and sequential QR and LU factorizations",
        # SIAM J. Sci. Comput. 34 (2012), section 3.
        copied, parts, count = [self._copied(each) for each in self.layouts], block.split(list(sizes)), block.shape[1]
        owned = [all(mesh.get_local_rank(dim) == 0 for mesh, dim in each) for each in copied]
        here = [block[:0], *(part for part, own in zip(parts, owned, strict=True) if own)]
        inner, triangle = torch.linalg.qr(torch.cat(here))
        place, ranks = self.mesh.mesh.flatten().tolist().index(dist.get_rank()), self.mesh.size()
        stacked = block.new_zeros(ranks, count, count)
        stacked[place, : len(triangle)] = triangle
        outer, whole = torch.linalg.qr(reduce_over(self.mesh, stacked).reshape(-1, count))
        rows = inner @ outer[place * count : place * count + len(triangle)]
        taken = iter(rows.split([size for size, own in zip(sizes, owned, strict=True) if own]))
        basis = []
        for part, own, shared in zip(parts, owned, copied, strict=True):
            found = next(taken).contiguous() if own else part.new_zeros(part.shape)
            for mesh, dim in shared:
                with exchanging("copying a part of a vector"):
                    dist.all_reduce(found, group=mesh.get_group(dim))
            basis.append(found)
        return torch.cat(basis), whole
