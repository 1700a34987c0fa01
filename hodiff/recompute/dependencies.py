"""The state that a callable reads beyond its arguments, as a captured graph sees it: tensors, and other values.

Tensors are inputs of a graph. Numbers, flags and called functions are part of the graph, so the graph is valid only
while they do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from hodiff.recompute.closed_over import Slot, filled_in, referenced
from hodiff.recompute.contents import Contents, Reader, constant_form, content_of, elements, kind_of
from hodiff.recompute.reachable import places
from hodiff.torch_internals.modules import MADE_OF_PARAMETERS

Form = tuple[Any, ...]


class Dependencies:
    """The dependencies of callables at the time of construction.

    Attributes:
        tensors: The tensors among the dependencies, once each, in the order that `filled` expects.
        form: A key; equal forms can share a graph, each with its own tensors.
        changed: Whether a run within `filled` has changed any dependency.
    """

    def __init__(self, *roots: Any):
        self.tensors: list[Tensor] = []
        self.changed = False
        self._index: dict[int, int] = {}
        self._slots: list[Slot] = []
        # References keep the ids of objects from being reused.
        self._objects: list[Any] = []
        self._containers: list[Any] = []
        self._readers: list[Reader] = []
        self.form: Form = tuple(self._walk(roots))
        arrays = [each for each in self._objects if isinstance(each, np.ndarray)]
        self._contents = Contents(self._containers, self._readers, arrays)
        self._forms = list(map(form_of, self.tensors))

    def hold(self) -> bool:
        """Whether nothing has changed, by identity of objects, so that form and tensors are still valid."""
        return self._contents.hold() and self._forms == list(map(form_of, self.tensors))

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Replace the tensors within the context, and restore all dependencies afterwards."""
        held = [slot.get() for slot in self._slots]
        before = list(map(_copied, self._containers))
        try:
            for slot in self._slots:
                slot.set(filled_in(slot.content, tensors))
            yield
        finally:
            for slot, value in zip(self._slots, held, strict=True):
                slot.set(value)
            for container, content in zip(self._containers, before, strict=True):
                self.changed |= _refill(container, content)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules among the dependencies."""
        return [each for each in self._objects if isinstance(each, nn.Module)]

    def _walk(self, roots: Sequence[Any]) -> Iterator[Any]:
        seen: dict[int, int] = {}
        stack = list(reversed(roots))
        while stack:
            value = stack.pop()
            if isinstance(value, Tensor):
                referenced(value, self.tensors, self._index)
                yield self._index[id(value)], *form_of(value)
                continue
            constant = constant_form(value)
            if constant is not None:
                yield constant
                continue
            if id(value) in seen:
                yield "again", seen[id(value)]
                continue
            seen[id(value)] = len(seen)
            self._objects.append(value)
            for get, set_, _ in places(value):
                content = referenced(held := get(), self.tensors, self._index)
                if content is not held:
                    self._slots.append(Slot(get, set_, content))
            kind, containers, readers, parts = content_of(value)
            self._containers += containers
            self._readers += readers
            yield kind, len(parts)
            stack.extend(reversed(parts))


def _copied(container: Any) -> Any:
    return dict(dict.items(container)) if isinstance(container, dict) else kind_of(container)(elements(container))


def _refill(container: Any, content: Any) -> bool:
    """Restore a container's elements, and return whether they had changed."""
    if _alike(container, content):
        return False
    changed = not _alike(_read_by_others(container), _read_by_others(content), depth=3)
    container.clear()
    getattr(container, "update" if hasattr(container, "update") else "extend")(content)
    return changed


def _read_by_others(container: Any) -> Any:
    """Return a container without entries that are recomputed before they are read."""
    if isinstance(container, dict):
        return {name: dict.get(container, name) for name in dict.keys(container) if name not in MADE_OF_PARAMETERS}
    return container


def _alike(one: Any, other: Any, depth: int = 1) -> bool:
    """Whether two containers hold the same objects, or down to a depth, containers of the same objects."""
    now, then = elements(one), elements(other)
    if isinstance(one, (set, frozenset)):  # a copy has another order
        now, then = sorted(now, key=id), sorted(then, key=id)
    return len(now) == len(then) and all(
        a is b or (depth > 1 and type(a) is type(b) in (list, tuple, dict) and _alike(a, b, depth - 1))
        for a, b in zip(now, then, strict=True)
    )


def form_of(tensor: Tensor) -> Form:
    """Return the properties of an input tensor that a graph depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
