"""Supports of every piece of memory, whichever tensors view it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from hodiff.sparse.detection.supports import Indices, Supports, empty, joined
from hodiff.torch_internals.tensors import WeakStorage

_CLEANING = 64


@dataclass
class _Held:
    """A storage whose values depend on the inputs: supports of its elements of `itemsize` bytes, if any.

    Without supports the values have no derivative: comparisons, roundings, positions. `tensor` keeps a
    tensor without storage alive, which is known by its id.
    """

    supports: Supports | None
    itemsize: int = 0
    tensor: Tensor | None = None


class Memory:
    """Supports of all live storages, so that views need no rule and writes through views are seen.

    A storage without an entry depends on nothing.
    """

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self._held: dict[Hashable, _Held] = {}
        self._written = 0

    def depends(self, x: Tensor) -> bool:
        """Whether values of a tensor depend on the inputs, with or without a derivative."""
        return _key(x) in self._held

    def supports(self, x: Tensor) -> Supports | None:
        """The supports of a tensor's elements, in its shape; None if it has no derivative."""
        held = self._held.get(_key(x))
        if held is None or held.supports is None or not has_derivatives(x):
            return None
        if not is_strided(x):
            return held.supports
        supports = _by_itemsize(held, x.element_size(), _count(x))
        return supports.take(_strided(supports.which, x))

    def write(self, x: Tensor, supports: Supports | None, *, depends: bool) -> None:
        """Set the supports of a tensor's elements, without changing other elements of its storage."""
        key = _key(x)
        if supports is not None and (supports.is_empty or not has_derivatives(x)):
            supports = None
        if not is_strided(x):
            held = None if supports is None and not depends else _Held(supports, tensor=x)
        else:
            held = self._merged(self._held.get(key), x, supports, depends=depends)
        self._held.pop(key, None)
        if held is not None:
            self._held[key] = held
        self._written += 1
        if self._written % _CLEANING == 0:
            self._held = {key: held for key, held in self._held.items() if not getattr(key, "expired", bool)()}

    def _merged(self, held: _Held | None, x: Tensor, supports: Supports | None, *, depends: bool) -> _Held | None:
        count, itemsize = _count(x), x.element_size()
        if x.numel() == count:
            held = None
        depends = depends or supports is not None or held is not None
        if supports is None and (held is None or held.supports is None):
            return _Held(None, itemsize) if depends else None
        before = empty((count,), self.inputs)
        if held is not None and held.supports is not None:
            before = _by_itemsize(held, itemsize, count)
        if supports is None:
            supports = empty(x.shape, self.inputs)
        if supports.sets is not before.sets and not before.is_empty:
            both = joined((before, supports))
            before, supports = both.take(both.which[:count]), both.take(both.which[count:]).reshape(*x.shape)
        which = np.array(before.which)
        if x.numel():
            _strided(which, x)[...] = supports.which
        return _Held(Supports(which, supports.sets).compact(), itemsize)


def has_derivatives(x: Tensor) -> bool:
    """Whether a tensor is floating-point or complex."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def is_strided(x: Tensor) -> bool:
    """Whether a tensor has strided memory."""
    return x.layout is torch.strided


def _key(x: Tensor) -> Hashable:
    return WeakStorage(x.untyped_storage()) if is_strided(x) else id(x)


def _count(x: Tensor) -> int:
    """Number of elements, of the tensor's element size, that its storage holds."""
    return x.untyped_storage().nbytes() // x.element_size()


def _strided(values: Indices, x: Tensor) -> Any:
    """View the numbers of a storage's elements as a tensor views its storage."""
    if not x.numel():
        return np.zeros(x.shape, dtype=values.dtype)
    size = values.itemsize
    return as_strided(values[x.storage_offset() :], x.shape, [size * stride for stride in x.stride()])


def _by_itemsize(held: _Held, itemsize: int, count: int) -> Supports:
    """Convert supports to another element size, such as where a complex tensor is viewed as a real tensor."""
    supports = held.supports
    assert supports is not None
    if held.itemsize == itemsize and len(supports.which) == count:
        return supports
    if held.itemsize % itemsize == 0 and len(supports.which) * held.itemsize == count * itemsize:
        return supports.take(np.repeat(supports.which, held.itemsize // itemsize))
    if itemsize % held.itemsize == 0 and len(supports.which) * held.itemsize == count * itemsize:
        return supports.reshape(count, itemsize // held.itemsize).over((1,))
    return supports.whole((count,))
