"""The numbers, switches and objects that a callable reads, put back to what they were for the time of a later run."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, NoneType
from typing import Any

import numpy as np
import torch

from hodiff.errors import InputError
from hodiff.recompute.reachable import is_tensor, names_of_globals

_PLAIN = {bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device}
_MISSING = object()


class PlainValues:
    """What is no tensor in the places that a callable can reach: a module's `training`, the entries of a list.

    Of NumPy arrays a checksum is kept. Tensors are not kept here, where autograd would not see them.
    """

    def __init__(self) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], set[Any] | None]] = []
        self._lists: list[tuple[list[Any], dict[int, Any], int]] = []
        self._arrays: list[tuple[np.ndarray, int]] = []

    def keep(self, value: Any) -> None:
        """Remember what an object holds."""
        if isinstance(value, dict):
            self._dicts.append((value, self._plain(value.items()), set(value)))
        elif isinstance(value, list):
            self._lists.append((value, self._plain(enumerate(value)), len(value)))
        elif isinstance(value, FunctionType):
            held = value.__globals__
            if plain := self._plain((name, held[name]) for name in names_of_globals(value)):
                self._dicts.append((held, plain, None))

    def keep_array(self, value: Any) -> None:
        """Remember the numbers of a NumPy array."""
        if isinstance(value, np.ndarray) and value.dtype != object:
            self._arrays.append((value, _checksum(value)))

    def _plain(self, entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        plain = {}
        for key, value in entries:
            kind = type(value)
            if kind in _PLAIN or not (is_tensor(kind) or issubclass(kind, tuple)):
                plain[key] = value
                if issubclass(kind, np.ndarray):
                    self.keep_array(value)
        return plain

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Put them back for a while; afterwards they are what they were before. Refuses what cannot be put back."""
        for array, checksum in self._arrays:
            if _checksum(array) != checksum:
                raise changed_since(name, "a NumPy array whose numbers changed")
        undo: list[tuple[Any, Any, Any]] = []
        tails: list[tuple[list[Any], list[Any]]] = []
        try:
            for held, plain, keys in self._dicts:
                undo += _put_back(held, plain)
                if keys is not None and len(held) > len(keys):
                    undo += [(held, key, held.pop(key)) for key in list(held) if key not in keys]
            for items, plain, length in self._lists:
                if len(items) < length:
                    raise changed_since(name, f"a list of {length} that has {len(items)} entries now")
                tails.append((items, items[length:]))
                del items[length:]
                undo += _put_back(items, plain)
            yield
        finally:
            for items, tail in reversed(tails):
                items += tail
            for held, key, value in reversed(undo):
                if value is _MISSING:
                    held.pop(key, None)
                else:
                    held[key] = value


def _put_back(held: Any, plain: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Put values where others are now; yields what to put there afterwards."""
    for key, value in plain.items():
        now = held.get(key, _MISSING) if isinstance(held, dict) else held[key]
        if now is not value and (type(value) not in _PLAIN or type(now) is not type(value) or now != value):
            held[key] = value
            yield held, key, now


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array))


def changed_since(name: str, what: str) -> InputError:
    """The error for what a later run needs as it was, and cannot have."""
    return InputError(
        f"{name}: f: expected what f reads to stay as it is until the last derivative is taken, as f runs again there, "
        f"got {what}; pass it as an argument, or a copy."
    )
