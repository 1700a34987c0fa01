"""Measure the memory that autograd graphs keep alive."""

import weakref

import torch


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
