"""Attention of DTensors: each rank attends within its heads or its part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError


def by_shards(
    attend: Callable[..., Tensor], q: Any, k: Any, v: Any, mask: Any, dropout_p: float, *, enable_gqa: bool
) -> Tensor:
    """Attend within the shards of each rank; dimensions other than batches and heads are gathered first."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(each.device_mesh for each in (q, k, v, mask) if isinstance(each, DTensor))
    given = [each for each in (q, k, v, mask) if each is not None]
    if not all(isinstance(each, DTensor) and each.device_mesh == mesh for each in given):
        kinds = ", ".join(type(each).__name__ for each in given)
        raise InputError(
            f"attention: expected DTensors of one device mesh, got {kinds}; "
            "torch.distributed.tensor.distribute_tensor creates one from a tensor."
        )
    if dropout_p:
        raise InputError(
            "attention: dropout_p: expected 0 for DTensors, because ranks would drop different weights, got "
            f"{dropout_p}; DTensor.full_tensor gathers a DTensor."
        )
    placements = _placements(mesh, q, k, v, mask, enable_gqa)
    of_mask = placements
    if mask is not None:
        apart = q.dim() - mask.dim()
        of_mask = [_moved(each, apart, mask.shape) for each in placements]
    local = [each.redistribute(mesh, placements).to_local() for each in (q, k, v)]
    y = attend(*local, mask if mask is None else mask.redistribute(mesh, of_mask).to_local())
    if all(type(each) is Replicate for each in placements):
        return DTensor.from_local(y, mesh, placements, run_check=False)
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    return DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=_strides(shape))


def _placements(mesh: Any, q: Any, k: Any, v: Any, mask: Any, enable_gqa: bool) -> list[Any]:
    """Use the placements of q in dimensions that all tensors can shard alike; replicate the others."""
    from torch.distributed.tensor import Replicate, Shard

    heads = q.dim() - 3

    def apart(placement: Any) -> bool:
        if type(placement) is not Shard or placement.dim > heads:
            return False
        dim = placement.dim
        # Heads stay with the keys that they share if both are cut evenly.
        if enable_gqa and dim == heads:
            return k.shape[dim] == v.shape[dim] and k.shape[dim] % mesh.size() == 0
        return bool(q.shape[dim] == k.shape[dim] == v.shape[dim])

    # The gradient of a mask that several ranks use would have to be summed.
    one_rank = not (q.dim() == k.dim() == v.dim()) or (mask is not None and mask.requires_grad)
    return [each if not one_rank and apart(each) else Replicate() for each in q.placements]


def _moved(placement: Any, apart: int, shape: Sequence[int]) -> Any:
    """Return the placement of a mask, which may lack leading dimensions or have size 1 in some."""
    from torch.distributed.tensor import Replicate, Shard

    if type(placement) is not Shard:
        return placement
    dim = placement.dim - apart
    return Shard(dim) if dim >= 0 and shape[dim] > 1 else Replicate()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * max(size, 1))
    return tuple(reversed(found))
