"""The numbers, switches and objects that a callable reads, restored to their first values during later runs."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.trees import tensors_in
from hodiff.errors import InputError
from hodiff.recompute.reachable import is_tensor, names_of_globals

_PLAIN = {bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device}
_MISSING = object()
# Containers that are restored as a whole.
_Other = deque[Any] | set[Any]


class PlainValues:
    """Values other than tensors in the places that a callable can reach: a module's `training`, entries of a list.

    For NumPy arrays a checksum is kept. Tensors are not kept here, because autograd would not see them.
    """

    def __init__(self) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, None] | None]] = []
        self._lists: list[tuple[list[Any], dict[int, Any], int]] = []
        self._arrays: list[tuple[np.ndarray, int]] = []
        self._others: list[tuple[_Other, list[Any]]] = []

    def keep(self, value: Any) -> None:
        """Remember the values in an object."""
        if isinstance(value, dict):
            self._dicts.append((value, self._plain(value.items()), dict.fromkeys(value)))
        elif isinstance(value, list):
            self._lists.append((value, self._plain(enumerate(value)), len(value)))
        elif isinstance(value, (deque, set)):
            if not any(isinstance(each, Tensor) for each in value):
                self._others.append((value, [*value]))
        elif isinstance(value, FunctionType):
            held = value.__globals__
            if plain := self._plain((name, held[name]) for name in names_of_globals(value)):
                self._dicts.append((held, plain, None))

    def keep_array(self, value: Any) -> None:
        """Remember the checksum of a NumPy array."""
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._arrays.append((value, _checksum(value)))

    def _plain(self, entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        plain = {}
        for key, value in entries:
            kind: Any = type(value)
            if kind in _PLAIN or not (is_tensor(kind) or issubclass(kind, tuple)):
                plain[key] = value
                if issubclass(kind, np.ndarray):
                    self.keep_array(value)
        return plain

    def left(self, inner: Set[int]) -> Iterator[Callable[[], Any]]:
        """Yield functions that read tensors which a run left in new places, except in the containers `inner`."""
        for held, plain, keys in self._dicts:
            if id(held) in inner:
                continue
            if not all(map(is_, map(held.get, plain), plain.values())):
                yield from (partial(held.get, key) for key in plain if holds_tensors(held.get(key)))
            if keys is not None and len(held) > len(keys):
                yield from (partial(held.get, key) for key in held if key not in keys and holds_tensors(held[key]))
        for items, plain, length in self._lists:
            for i in (*plain, *range(length, len(items))):
                if i < len(items) and id(items) not in inner and holds_tensors(items[i]):
                    yield partial(items.__getitem__, i)

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Restore the first values within the context; raise for values that cannot be restored."""
        for array, checksum in self._arrays:
            if _checksum(array) != checksum:
                raise changed_since(name, "a NumPy array whose numbers changed")
        # State before the later run: plain values, entries beyond the first keys, and tails of longer lists.
        undo: list[tuple[Any, Any, Any]] = []
        tails: list[tuple[list[Any], list[Any]]] = []
        for items, _, length in self._lists:
            if len(items) < length:
                raise changed_since(name, f"a list of {length} that has {len(items)} entries now")
        others = [(value, first, [*value]) for value, first in self._others]
        # Hooks run in the order of their entries.
        orders = [(held, [*keys], [*held]) for held, _, keys in self._dicts if keys is not None and [*held] != [*keys]]
        try:
            for value, first, now in others:
                _fill(value, now, first)
            tails += [(items, items[length:]) for items, _, length in self._lists if len(items) > length]
            undo += self._as_first()
            for held, first, _ in orders:
                _reorder(held, first)
            yield
        finally:
            for value, _, now in others:
                _fill(value, [*value], now)
            for _ in self._as_first():
                pass
            for items, tail in tails:
                items += tail
            for held, key, value in reversed(undo):
                if value is _MISSING:
                    held.pop(key, None)
                else:
                    held[key] = value
            for held, _, now in orders:
                _reorder(held, now)

    def _as_first(self) -> Iterator[tuple[Any, Any, Any]]:
        """Restore everything to what the first run found; yield what was there instead."""
        for held, plain, keys in self._dicts:
            yield from _put_back(held, plain)
            if keys is not None and len(held) > len(keys):
                yield from ((held, key, held.pop(key)) for key in list(held) if key not in keys)
        for items, plain, length in self._lists:
            del items[length:]
            if len(items) == length:
                yield from _put_back(items, plain)


def _fill(value: _Other, now: list[Any], wanted: list[Any]) -> None:
    """Replace the elements of a deque or a set, unless it holds the wanted ones now."""
    if len(now) == len(wanted) and all(map(is_, now, wanted)):
        return
    value.clear()
    for each in wanted:
        value.append(each) if isinstance(value, deque) else value.add(each)


def _reorder(held: dict[Any, Any], keys: list[Any]) -> None:
    """Put the entries of a dict in the order of its keys."""
    if [*held] != keys:
        for key in keys:
            if key in held:
                held[key] = held.pop(key)


def _put_back(held: Any, plain: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Put values back; yield the values that they replace."""
    if isinstance(held, dict) and all(map(is_, map(held.get, plain), plain.values())):
        return
    for key, value in plain.items():
        now = held.get(key, _MISSING) if isinstance(held, dict) else held[key]
        if now is not value and (type(value) not in _PLAIN or type(now) is not type(value) or now != value):
            held[key] = value
            yield held, key, now


def holds_tensors(value: Any) -> bool:
    """Whether a value is, or contains, tensors that derivatives may pass through."""
    return any(each.is_floating_point() or each.is_complex() for each in tensors_in(value))


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def changed_since(name: str, what: str) -> InputError:
    """Return the error for a value that has changed since the first run and cannot be restored."""
    return InputError(
        f"{name}: f: expected what f reads to stay as it is until the last derivative is taken, as f runs again there, "
        f"got {what}; pass it as an argument, or a copy."
    )
