"""Sums over the ranks of a process group, and batches that all ranks of a device mesh take together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.distributed.exchanges import exchanging
from hodiff.distributed.points import ShardedPoint
from hodiff.distributed.vectors import reduce_over
from hodiff.errors import InputError
from hodiff.operators.data.batches import Batch, Size


def require_group(caller: str, argument: str, process_group: Any) -> None:
    """Raise if a process group is unusable, or `torch.distributed` is not available or not initialised."""
    if process_group is None:
        return
    if not dist.is_available() or not dist.is_initialized() or isinstance(process_group, str):
        raise InputError(
            f"{caller}: {argument}: expected a process group of an initialised torch.distributed, got "
            f"{process_group!r}; "
            "call torch.distributed.init_process_group first, and pass torch.distributed.group.WORLD."
        )
    if dist.get_rank(process_group) < 0:
        raise InputError(
            f"{caller}: {argument}: expected a group that this process belongs to, got {process_group!r}; "
            "create the operator only on ranks of the group."
        )


def size_of(process_group: Any) -> int:
    """Return the number of ranks of a group; 1 for None."""
    return 1 if process_group is None else dist.get_world_size(process_group)


def rank_in(process_group: Any) -> int:
    """Return this process's rank in a group; 0 for None."""
    return 0 if process_group is None else dist.get_rank(process_group)


def sum_over_ranks(total: Tensor, size: Size, process_group: Any) -> tuple[Tensor, Size]:
    """Add up products and sizes of all ranks."""
    if process_group is None:
        return total, size
    total = total.contiguous()
    sizes = torch.tensor([size.divisor, size.factors], dtype=torch.float64, device=total.device)
    with exchanging("adding up the products of ranks"):
        dist.all_reduce(total, group=process_group)
        dist.all_reduce(sizes, group=process_group)
    return total, Size(*sizes.tolist())


def in_step(caller: str, batches: Iterable[Batch], mesh: Any) -> Iterator[Batch]:
    """Iterate over the batches of all ranks of a mesh, which gather parameters together.

    Args:
        caller: The operator, for error messages.
        batches: The batches of this rank.
        mesh: The device mesh of the parameters; None for one process.

    Yields:
        Each batch.

    Raises:
        InputError: On all ranks, if ranks have different numbers of batches, or the batches of a rank raise an error.
    """
    if mesh is None:
        yield from batches
        return
    own = iter(batches)
    while True:
        batch, error = None, None
        try:
            batch = next(own, None)
        except Exception as caught:
            error = caught
        numbers = torch.tensor([float(batch is not None), float(error is not None)], device=mesh.device_type)
        present, failed = reduce_over(mesh, numbers).tolist()
        if error is not None:
            raise error
        if failed:
            raise InputError(
                f"{caller}: data: expected batches on every rank, got an error on another rank; see the error message "
                "there."
            )
        if present not in (0, int(mesh.size())):
            raise InputError(
                f"{caller}: data: expected the same number of batches that count on every rank, because ranks gather "
                f"parameters together, got a batch on {present:g} of {mesh.size()} ranks; split the data evenly, or "
                "leave out the last batches."
            )
        if batch is None:
            return
        yield batch


class JointBatches:
    """Batches of an operator whose parameters are sharded: all ranks of the mesh linearize at the same time.

    Args:
        caller: The operator, for error messages.
        point: The operator's point.
        mesh: The device mesh of the parameters.
        process_group: The group whose ranks have different data, or None if all ranks have the same.

    Raises:
        InputError: If the group does not fit the mesh.
    """

    def __init__(self, caller: str, point: ShardedPoint, mesh: Any, process_group: Any):
        self._caller, self._mesh = caller, mesh
        self._fully = point.modules is not None
        data_mesh: Any = mesh if point.modules is None else point.modules.mesh
        # Ranks of a fully sharded model have different data, and each product is the sum over ranks already.
        self.is_sum = self._fully and process_group is not None
        self._data_mesh = data_mesh
        if process_group is None:
            return
        ranks, own = set(dist.get_process_group_ranks(process_group)), dist.get_rank()
        on_mesh = set(data_mesh.mesh.flatten().tolist())
        if self._fully and ranks != on_mesh:
            raise InputError(
                f"{caller}: process_group: expected the ranks of the mesh of fully_shard, {sorted(on_mesh)}, got "
                f"{sorted(ranks)}; pass the group of that mesh, such as torch.distributed.group.WORLD."
            )
        if not self._fully and ranks & on_mesh != {own}:
            raise InputError(
                f"{caller}: process_group: expected a group that has only this rank in common with the device mesh of "
                f"the DTensors, {sorted(on_mesh)}, because a function of DTensors is one program of all their ranks, "
                f"got {sorted(ranks)}; distribute the batches over the mesh, and omit process_group."
            )

    def _reduced(self, numbers: list[float], operation: str, mesh: Any = None) -> list[float]:
        mesh = self._mesh if mesh is None else mesh
        on_device = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
        return reduce_over(mesh, on_device, operation).tolist()

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers."""
        return int(self._reduced([float(number)], "MIN")[0])

    def all(self, told: bool) -> bool:
        """Whether all ranks say yes."""
        return bool(self._reduced([float(told)], "MIN")[0])

    def in_step(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the batches of all ranks; see the function."""
        return in_step(self._caller, batches, self._mesh)

    def weigh(self, size: Size) -> tuple[Size, float | None]:
        """Exchange the sizes of the ranks' batches.

        Args:
            size: The size of this rank's batch.

        Returns:
            The size of the joint batch, and the weight of this rank in it; None for the weight of a mean over ranks.

        Raises:
            InputError: If ranks have batches of other sizes without a process group.
        """
        if self.is_sum:
            joint = Size(*self._reduced([size.divisor, size.factors], "SUM", self._data_mesh))
            return joint, size.weight / joint.weight
        low, high = (self._reduced([size.divisor, size.factors], each) for each in ("MIN", "MAX"))
        if low != high:
            raise InputError(
                f"{self._caller}: data: expected batches of one size on all ranks, got {low[0]:g} to {high[0]:g} "
                "examples; pass process_group if ranks have different data."
            )
        return size, None
