"""Graphs that save the shard of a gathered parameter, and gather it again when a derivative needs it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from hodiff.distributed.exchanges import leaving_notes
from hodiff.distributed.layouts import Layout
from hodiff.distributed.linear_maps import gather
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.tensors import WeakStorage, storage_of

T = TypeVar("T")

# Gathered tensors that stay in memory: several nodes of one layer ask for its parameters in a row.
_KEPT = 2
# torch.func refuses to run where tensors are saved by hooks.
_REFUSED = "saved tensor hooks"


@dataclass(frozen=True, eq=False)
class Source:
    """How to compute a gathered parameter: its shard, its layout, and the dtype to which it is converted."""

    shard: Tensor
    layout: Layout
    dtype: torch.dtype

    def gathered(self) -> Tensor:
        """Gather the parameter, as a constant."""
        with torch.no_grad(), outside_transforms():
            return gather(self.shard, self.layout).to(self.dtype)


class _Graph:
    """Gathered parameters of one recorded graph, by their storages."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Any, Source]] = {}
        self._near: OrderedDict[Source, Tensor] = OrderedDict()

    def know(self, whole: Tensor, source: Source) -> None:
        # Numbers of storages are used again, so entries of storages that are gone are removed.
        self._sources = {key: each for key, each in self._sources.items() if not each[0].expired()}
        self._sources[storage_of(whole)] = WeakStorage(whole.untyped_storage()), source

    def pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or in_transform():
            return tensor
        storage, source = self._sources.get(storage_of(tensor), (None, None))
        if source is None or storage is None or storage.expired() or tensor.dtype != source.dtype:
            return tensor
        return source, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        source, *form = saved
        if source not in self._near:
            while len(self._near) >= _KEPT:
                self._near.popitem(last=False)
            self._near[source] = source.gathered()
            _holding.add(self)
            self.know(self._near[source], source)
        return self._near[source].as_strided(*form)

    def forget(self) -> None:
        self._near.clear()


# Graphs that hold gathered tensors.
_holding: WeakSet[_Graph] = WeakSet()


def free_gathered() -> None:
    """Free the gathered tensors that a pass through a graph has left in memory."""
    while _holding:
        _holding.pop().forget()


_graph: ContextVar[_Graph | None] = ContextVar("graph", default=None)


def saved_by_shard(whole: Tensor, shard: Tensor, layout: Layout) -> None:
    """Note how a parameter was gathered, so that a graph that is being recorded saves its shard."""
    graph = _graph.get()
    if graph is not None and not in_transform():
        graph.know(whole, Source(shard.detach(), layout, whole.dtype))


def saving_shards(record: Callable[[], T]) -> T:
    """Run code that records a graph, with shards saved in place of gathered parameters where torch allows it."""
    graph = _Graph()
    token = _graph.set(graph)
    try:
        with torch.autograd.graph.saved_tensors_hooks(graph.pack, graph.unpack), leaving_notes():
            return record()
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
    finally:
        _graph.reset(token)
        graph.forget()
    return record()
