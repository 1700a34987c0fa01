"""Measure the memory that autograd graphs save, and the memory of all live tensors."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SavedMemory:
    """Count the bytes that live graphs save, each storage once."""

    def __init__(self):
        self._boxes = []

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box[0])
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor):
        box = _Box([tensor])
        self._boxes.append(weakref.ref(box))
        return box

    def nbytes(self):
        alive = [box()[0].untyped_storage() for box in self._boxes if box() is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())


class _Box(list):
    """A list that supports weak references."""

    __slots__ = ("__weakref__",)


class LiveMemory(TorchDispatchMode):
    """Count the bytes of live storages that are created inside the context, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, Tensor):
                self._count(output.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return result

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.bytes += size

        def free() -> None:
            self.bytes -= size
            self._known.discard(key)

        weakref.finalize(storage, free)
