"""How the shards of a tensor lie on a device mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.errors import InputError


def is_distributed(tensor: Any) -> bool:
    """Whether a value is a DTensor; False if the module of DTensors is not loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_distributed(tensors: Iterable[Any]) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    for each in tensors:  # noqa: SIM110 - an expression makes a Python call for each tensor
        if isinstance(each, module.DTensor):
            return True
    return False


def require_ordinary(caller: str, **arguments: Any) -> None:
    """Raise if an argument, a pytree, has DTensors."""
    for name, tree in arguments.items():
        if any_distributed(pytree.tree_leaves(tree)):
            raise InputError(
                f"{caller}: {name}: expected ordinary tensors, got DTensors; pass full_tensor() of them. hodiff.hvp, "
                "value_grad_hvp, grad_and_hvp and the operators of curvature support DTensors."
            )


def local_part(tensor: Any) -> Tensor:
    """Return the part of a tensor that lies on this rank, which shares its memory."""
    local: Tensor = tensor.detach().to_local() if is_distributed(tensor) else tensor
    return local


@dataclass(frozen=True)
class Layout:
    """Mesh, placements and shape of a DTensor whose local tensor is stored separately.

    Attributes:
        mesh: The device mesh.
        placements: The placement on each dimension of the mesh.
        shape: Shape of the whole tensor.
        gathered: Dimensions of the mesh over which `Gather` collects the shards.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    gathered: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        """Return the layout of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(range(tensor.device_mesh.ndim)))

    @classmethod
    def replicated(cls, mesh: Any, shape: torch.Size, gathered: tuple[int, ...] | None = None) -> Layout:
        """Return the layout of a tensor that every rank of a mesh has."""
        from torch.distributed.tensor import Replicate

        return cls(mesh, (Replicate(),) * mesh.ndim, shape, tuple(range(mesh.ndim)) if gathered is None else gathered)

    @property
    def whole(self) -> tuple[Any, ...]:
        """The placements after `Gather`."""
        from torch.distributed.tensor import Replicate

        return tuple(Replicate() if i in self.gathered else each for i, each in enumerate(self.placements))

    @property
    def summands(self) -> tuple[Any, ...]:
        """The placements before `Scatter`, which adds up a tensor of each rank."""
        from torch.distributed.tensor import Partial

        return tuple(Partial() if i in self.gathered else each for i, each in enumerate(self.placements))

    def over(self, data_mesh: Any) -> Layout | None:
        """Return the layout gathered over a mesh that is this mesh or a part of it; None if it is neither."""
        if self.mesh == data_mesh:
            return self
        names, wanted = self.mesh.mesh_dim_names or (), data_mesh.mesh_dim_names or ()
        if not wanted or not set(wanted) <= set(names) or self.mesh[wanted] != data_mesh:
            return None
        return replace(self, gathered=tuple(names.index(each) for each in wanted))

    @property
    def rest(self) -> Layout | None:
        """The layout of a gathered tensor on the other dimensions of the mesh; None if there is no other dimension."""
        names = [each for i, each in enumerate(self.mesh.mesh_dim_names or ()) if i not in self.gathered]
        if len(self.gathered) == self.mesh.ndim:
            return None
        placements = tuple(each for i, each in enumerate(self.placements) if i not in self.gathered)
        return Layout(self.mesh[tuple(names)], placements, self.shape, tuple(range(len(names))))

    @property
    def everywhere(self) -> tuple[Any, ...]:
        """Placements of a tensor that every rank has."""
        from torch.distributed.tensor import Replicate

        return (Replicate(),) * self.mesh.ndim

    @property
    def copies(self) -> int:
        """Number of ranks that store each number."""
        sizes = [self.mesh.size(i) for i, each in enumerate(self.placements) if each.is_replicate()]
        return int(torch.Size(sizes).numel())

    def batched(self, count: int) -> Layout:
        """Return the layout of `count` such tensors, stacked along a new first dimension."""
        return replace(self, placements=tuple(map(_moved, self.placements)), shape=torch.Size((count, *self.shape)))

    def dtensor(self, local: Tensor, placements: tuple[Any, ...] | None = None) -> Any:
        """Create the DTensor of a local tensor, without a record."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        placements = self.placements if placements is None else placements
        return DTensor.from_local(
            local.detach().contiguous(), self.mesh, placements, run_check=False, shape=self.shape, stride=stride
        )


def _moved(placement: Any) -> Any:
    """Return a placement one dimension further on."""
    if not hasattr(placement, "dim"):
        return placement
    factor = getattr(placement, "split_factor", None)
    kind = type(placement)
    return kind(placement.dim + 1) if factor is None else kind(placement.dim + 1, split_factor=factor)


def layout_of(tensor: Any, caller: str, name: str) -> Layout:
    """Return the layout of a differentiated DTensor; raise `InputError` if it has partial sums."""
    layout = Layout.of(tensor)
    if any(each.is_partial() for each in layout.placements):
        raise InputError(
            f"{caller}: {name}: expected a DTensor with placements Shard or Replicate, got {layout.placements}; "
            "call redistribute of it first."
        )
    return layout
