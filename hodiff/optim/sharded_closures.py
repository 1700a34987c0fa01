"""Losses of closures as functions of the local shards of parameters under `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.distributed.layouts import Layout, is_distributed
from hodiff.distributed.linear_maps import as_dtensor
from hodiff.distributed.points import ShardedPoint
from hodiff.distributed.regathering import saving_shards
from hodiff.errors import InputError
from hodiff.graphs import inspect_graph
from hodiff.optim.inner_products import InnerProductOfShards
from hodiff.optim.ranks import Ranks
from hodiff.recompute.reachable import modules_in

R = TypeVar("R")


class ShardedClosure:
    """A closure that calls modules under `fully_shard`, evaluated as a function of local shards.

    Graphs save shards in place of gathered parameters. Gradients and products sum over all ranks, and collect shards,
    without any hook of `fully_shard`, whose backward pass torch cannot differentiate.

    Args:
        caller: Name of the optimizer.
        closure: The closure.
        parameters: Sharded parameters with respect to which the loss is differentiated.
        ranks: Ranks of the optimizer's process group.

    Raises:
        InputError: If the closure calls no module under `fully_shard`, or its mesh is not that of the group.
    """

    def __init__(self, caller: str, closure: Callable[[], Any], parameters: Sequence[Tensor], ranks: Ranks):
        self._caller, self._closure = caller, closure
        modules, own = modules_in(closure), {id(p): p for p in parameters}
        trained = {id(p): p for m in modules for p in m.parameters() if p.requires_grad and is_distributed(p)}
        # Parameters of other optimizers follow those of this one.
        self._count, self._parameters = len(own), list({**own, **trained}.values())
        point = ShardedPoint.of(caller, self._parameters, lambda: modules)
        if point is None or point.modules is None or point.modules.mesh is None:
            raise InputError(
                f"{caller}: closure: expected a closure that calls modules under fully_shard, because the parameters "
                "are DTensors, got one that calls none; close over the model, and apply fully_shard to it."
            )
        self._point, mesh = point, point.modules.mesh
        on_mesh, in_group = sorted(mesh.mesh.flatten().tolist()), sorted(dist.get_process_group_ranks(ranks.group))
        if any(each is not None and each.mesh != mesh for each in point.layouts) or on_mesh != in_group:
            raise InputError(
                f"{caller}: process_group: expected the ranks of the device mesh of fully_shard, {on_mesh}, and all "
                f"parameters on that mesh alone, got ranks {in_group}; pass the group of that mesh, and use no tensor "
                "parallelism."
            )
        self._leaves = [
            point.local(p.detach(), i).detach().requires_grad_(p.requires_grad) for i, p in enumerate(self._parameters)
        ]
        self._places = {id(p): i for i, p in enumerate(self._parameters)}

    def returned(self) -> Any:
        """Evaluate the closure; the graph of what it returns leads to the shards."""
        before = [p.grad for p in self._parameters]
        arguments = self._point.arguments(self._leaves)
        with self._point.running(arguments):
            found = self._point.plain(self._closure())
        written = any(leaf.grad is not None for leaf in self._leaves) or any(
            p.grad is not None and p.grad is not old for p, old in zip(self._parameters, before, strict=True)
        )
        if written:
            raise InputError(
                f"{self._caller}: closure: expected a closure that returns the loss and does not call backward where "
                "the curvature of sharded parameters is computed, got one that does; remove backward, step sets the "
                "gradients."
            )
        return found

    def recorded(self, record: Callable[[], R]) -> R:
        """Run code that records graphs, which save shards."""
        return saving_shards(record)

    def joint(self, value: Tensor) -> Tensor:
        """Return the mean of the ranks' values, with its graph."""
        with torch.enable_grad():
            return self._point.joint(value.reshape(()))

    @property
    def weight(self) -> float:
        """Weight of this rank's loss in the mean."""
        return self._point.own_weight

    def leaves_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the shards of parameters, the leaves of the graph."""
        return [self._leaves[self._places[id(p)]] for p in parameters]

    def reached(self, *outputs: Tensor) -> list[Tensor]:
        """Return the optimizer's parameters on which tensors depend."""
        found = {id(leaf) for each in outputs for leaf in inspect_graph(each).leaves}
        own = zip(self._parameters[: self._count], self._leaves, strict=False)
        return [p for p, leaf in own if id(leaf) in found]

    def others(self, output: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the other parameters on which a tensor depends, each with its leaf of the graph."""
        parameter_of = {id(leaf): p for p, leaf in zip(self._parameters, self._leaves, strict=True)}
        own = set(map(id, self._leaves[: self._count]))
        leaves = [leaf for leaf in inspect_graph(output).leaves if id(leaf) not in own]
        return [(parameter_of.get(id(leaf), leaf), leaf) for leaf in leaves]

    def inner_product(self, parameters: Sequence[Tensor]) -> InnerProductOfShards:
        """Return the inner product of vectors with a part for each parameter."""
        assert self._point.modules is not None
        sizes = [leaf.numel() for leaf in self.leaves_of(parameters)]
        return InnerProductOfShards(self._point.modules.mesh, list(map(Layout.of, parameters)), sizes)

    def like(self, parameter: Tensor, local: Tensor) -> Tensor:
        """Return a local tensor as a DTensor that is sharded like a parameter.

        A gradient of the joint loss in an ordinary tensor becomes that of this rank's loss, as `fully_shard` has it.
        """
        if id(parameter) not in self._places:
            return local / self.weight
        layout = self._point.layouts[self._places[id(parameter)]]
        assert layout is not None
        with torch.no_grad():
            found: Tensor = as_dtensor(local, layout)
        return found


def shard_like(parameter: Any, whole: Tensor) -> Tensor:
    """Return the part of a whole tensor, equal on all ranks, that lies on this rank for a parameter like it."""
    layout = Layout.of(parameter)
    local: Tensor = layout.dtensor(whole, layout.everywhere).redistribute(placements=layout.placements).to_local()
    return local
