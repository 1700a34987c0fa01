r"""Moves between shards, whole tensors and DTensors, as linear maps with derivatives of every order on every route.

`Gather` collects the shards of a tensor on every rank, and `Scatter` adds up a whole tensor of each rank and keeps the
shard: $\langle \sum_r u_r, G x \rangle = \langle S u, x \rangle$, so each is the transpose of the other. `AsDTensor`
and `AsLocal` change the type only. torch's `redistribute` moves all bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from hodiff.distributed.exchanges import exchanging
from hodiff.distributed.layouts import Layout
from hodiff.graphs import nodes_of
from hodiff.torch_internals.autograd.graph_nodes import function_of

# `to_local` returns tensors that have not arrived yet, unless gradients are off and the move is awaited.
_no_grad = torch.no_grad()


@_no_grad
def _collect(shard: Tensor, layout: Layout) -> Tensor:
    with exchanging("gathering a parameter"):
        whole: Tensor = layout.dtensor(shard).redistribute(placements=layout.whole, async_op=False).to_local()
    return whole.view_as(whole)


@_no_grad
def _reduce(whole: Tensor, layout: Layout) -> Tensor:
    summed = layout.dtensor(whole, layout.summands)
    with exchanging("adding up the results of ranks"):
        shard: Tensor = summed.redistribute(placements=layout.placements, async_op=False).to_local()
    return shard.view_as(shard)


@_no_grad
def _wrap(local: Tensor, layout: Layout) -> Any:
    return layout.dtensor(local.view_as(local))


@_no_grad
def _unwrap(tensor: Any, layout: Layout) -> Tensor:
    local: Tensor = tensor.to_local()
    return local.view_as(local)


def _linear_map(
    name: str,
    move: Callable[[Any, Layout], Any],
    transpose: Callable[[Any, Layout], Any],
    own: Callable[[Any, Layout], Any],
) -> Any:
    class Map(Function):
        @staticmethod
        def forward(x: Any, layout: Layout) -> Any:
            return move(x, layout)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, Layout], output: Any) -> None:
            ctx.set_materialize_grads(False)
            _, ctx.layout = inputs

        @staticmethod
        def backward(ctx: Any, cotangent: Any) -> tuple[Any, None]:
            return None if cotangent is None else transpose(cotangent, ctx.layout), None

        @staticmethod
        def jvp(ctx: Any, tangent: Any, _: None) -> Any:
            return None if tangent is None else own(tangent, ctx.layout)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int, None], x: Any, layout: Layout) -> tuple[Any, int]:
            return own(x.movedim(in_dims[0], 0), layout.batched(info.batch_size)), 0

    Map.__name__ = name
    return Map


def gather(shard: Tensor, layout: Layout) -> Tensor:
    """Collect the shards of all ranks; the result is a tensor of each rank, whose cotangents differ."""
    whole: Tensor = _Gather.apply(shard, layout)
    return whole


def gathered_in(output: Tensor | GradientEdge) -> list[tuple[Tensor, GradientEdge]]:
    """Return the gathers of shards in a graph: the shard, a leaf, and the edge of the gathered tensor."""
    found = []
    for node in nodes_of(output):
        before: Any = node.next_functions[0][0] if node.next_functions else None
        if function_of(node) is _Gather and hasattr(before, "variable"):
            found.append((before.variable, GradientEdge(node, 0)))
    return found


def scatter(whole: Tensor, layout: Layout) -> Tensor:
    """Add up the tensors of all ranks, and return this rank's shard of the sum."""
    shard: Tensor = _Scatter.apply(whole, layout)
    return shard


def as_dtensor(local: Tensor, layout: Layout) -> Any:
    """Return a local tensor as a DTensor of this layout."""
    return _AsDTensor.apply(local, layout)


def as_local(tensor: Any, layout: Layout) -> Tensor:
    """Return the local tensor of a DTensor, moved to this layout first."""
    # Within vmap, the batching rule calls this again with the DTensor.
    if tuple(getattr(tensor, "placements", layout.placements)) != layout.placements:
        tensor = tensor.redistribute(layout.mesh, layout.placements)
    local: Tensor = _AsLocal.apply(tensor, layout)
    return local


_Gather = _linear_map("Gather", _collect, scatter, gather)
_Scatter = _linear_map("Scatter", _reduce, gather, scatter)
_AsDTensor = _linear_map("AsDTensor", _wrap, as_local, as_dtensor)
_AsLocal = _linear_map("AsLocal", _unwrap, as_dtensor, as_local)
