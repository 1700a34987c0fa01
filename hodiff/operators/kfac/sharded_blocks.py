"""Blocks of sharded parameters, each on one rank: their factors over all ranks, and products with sharded vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hodiff.distributed.exchanges import exchanging
from hodiff.distributed.linear_maps import gather, scatter
from hodiff.distributed.owners import least_loaded
from hodiff.distributed.points import ShardedPoint
from hodiff.distributed.vectors import Shards, reduce_over
from hodiff.errors import InputError
from hodiff.operators.data.batches import Batch, Size
from hodiff.operators.data.distributed import JointBatches, in_step, rank_in, size_of, sum_over_ranks
from hodiff.operators.kfac.blocks import Layout
from hodiff.operators.linear.spaces import Space

R = TypeVar("R")


class JointFactors:
    """The ranks over whose examples factors are summed, and which of them stores each block.

    Args:
        caller: Name of the operator.
        shards: Shards of the parameters, if there are any.
        leaves: The parameters.
        model: The model.
        process_group: Group of the ranks, or None for a single rank.

    Raises:
        InputError: If sharded parameters are not those of a model under `fully_shard`, on the mesh of the group.
    """

    def __init__(
        self, caller: str, shards: Shards | None, leaves: Sequence[Tensor], model: nn.Module, process_group: Any
    ):
        self._caller, self._shards, self.group = caller, shards, process_group
        self._size, self._rank = size_of(process_group), rank_in(process_group)
        if shards is None:
            return
        point = ShardedPoint.of(caller, leaves, lambda: [model])
        if (
            point is None
            or point.modules is None
            or any(each is None or each.mesh != point.modules.mesh for each in point.layouts)
        ):
            raise InputError(
                f"{caller}: x: expected parameters of a model under fully_shard, on its mesh alone, got other DTensors "
                "or tensor parallelism; use GaussNewtonOperator, which supports them."
            )
        if process_group is None:
            raise InputError(
                f"{caller}: process_group: expected the group of the ranks of fully_shard, each with its own data, got "
                "None; pass torch.distributed.group.WORLD."
            )
        # This compares the group with the mesh.
        JointBatches(caller, point, shards.mesh, process_group)

    def in_step(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over batches; all ranks of sharded parameters take them together."""
        return in_step(self._caller, batches, None if self._shards is None else self._shards.mesh)

    def number_of(self, batch: Batch) -> int:
        """Return the number of a batch among those of all ranks."""
        return batch.index * self._size + self._rank

    def sum_(self, tensors: Sequence[Tensor | None]) -> None:
        """Replace tensors by their sums over the ranks, in place."""
        if self.group is None:
            return
        having = torch.tensor([float(each is not None) for each in tensors], dtype=torch.float64)
        least = having.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        if not bool((least == having).all()):
            raise InputError(
                f"{self._caller}: data: expected targets that count in the loss on every rank, got a rank without; "
                "distribute the examples so that every rank has some."
            )
        with exchanging("adding up the factors of ranks"):
            for each in tensors:
                if each is not None:
                    whole = each.contiguous()
                    dist.all_reduce(whole, group=self.group)
                    each.copy_(whole)

    def sizes(self, own: Size) -> Size:
        """Return the joint size of the batches of all ranks."""
        return sum_over_ranks(torch.zeros(1), own, self.group)[1]

    def owned(self, layouts: Sequence[Layout]) -> list[bool]:
        """Return which blocks this rank stores; all, unless parameters are sharded."""
        if self._shards is None:
            return [True] * len(layouts)
        costs = [float(p**3 + q**3) for _, p, q in (each.shape for each in layouts)]
        return [owner == self._rank for owner in least_loaded(costs, self._size)]


def agreed(space: Space, caller: str, work: Callable[[], R]) -> R:
    """Do this rank's part of a work on blocks; raise on all ranks if it fails on one."""
    if space.shards is None:
        return work()
    error: Exception | None = None
    found: Any = None
    try:
        found = work()
    except InputError as caught:
        error = caught
    failed = torch.tensor([float(error is not None)], device=space.shards.mesh.device_type)
    if float(reduce_over(space.shards.mesh, failed)):
        raise error or InputError(
            f"{caller}: expected every rank to compute its blocks; see the error of another rank."
        )
    return found


def total(space: Space, number: Tensor) -> Tensor:
    """Add up numbers of the blocks of all ranks; each block is on one rank."""
    return number if space.shards is None else reduce_over(space.shards.mesh, number.clone())


def product(space: Space, blocks: Sequence[Any], act: Callable[[Any, Tensor], Tensor], columns: Tensor) -> Tensor:
    """Apply `act` to each block and its part of sharded columns (n, k), on the rank that has the block."""
    shards, count = space.shards, columns.shape[1]
    assert shards is not None
    mine = {piece.index for each in blocks for piece in each.layout.pieces}
    rows: dict[int, Tensor] = {}
    for i, part in enumerate(columns.t().split(space.sizes, dim=1)):
        whole = gather(part.reshape(count, *space.shapes[i]), shards.layouts[i].batched(count))
        if i in mine:
            rows[i] = whole.reshape(count, -1)
    parts = [(each.layout, act(each, each.layout.gather(_Rows(rows), count))) for each in blocks]
    return scattered(space, parts, count)


def scattered(space: Space, parts: Sequence[tuple[Layout, Tensor]], count: int) -> Tensor:
    """Return matrices (count, groups, p, q) of this rank's blocks as sharded columns (n, count)."""
    shards = space.shards
    assert shards is not None
    leaves: list[Tensor | None] = [None] * len(space.sizes)
    for layout, matrices in parts:
        layout.scatter(matrices, leaves)
    found = []
    for leaf, its in zip(leaves, shards.layouts, strict=True):
        whole = torch.zeros(count, *its.shape, dtype=space.dtype, device=space.device) if leaf is None else leaf
        found.append(scatter(whole.reshape(count, *its.shape), its.batched(count)).reshape(count, -1))
    return torch.cat(found, dim=1).t()


class _Rows(Sequence[Tensor]):
    """Some leaves of a list, by their numbers."""

    def __init__(self, rows: dict[int, Tensor]):
        self._rows = rows

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)
