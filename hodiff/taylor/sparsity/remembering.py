"""Cache of results that are derived from supports, within a memory budget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Bytes of all cached results. Data that decide which elements depend on which, as in a sort, add new results at every
# call.
BUDGET = 64 * 2**20
# Bytes of a result besides its arrays.
_LEAST = 512


class _Memory:
    """Cache of the most recently used results."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.results: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self.bytes = 0

    def find(self, key: Any) -> tuple[Any, int] | None:
        with self.lock:
            found = self.results.get(key)
            if found is not None:
                self.results.move_to_end(key)
            return found

    def keep(self, key: Any, result: Any, size: int) -> None:
        with self.lock:
            if key not in self.results:
                self.results[key] = (result, size)
                self.bytes += size
            while self.bytes > BUDGET and len(self.results) > 1:
                _, (_, least) = self.results.popitem(last=False)
                self.bytes -= least


MEMORY = _Memory()


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that caches a function of supports and numbers, whose results have a size `nbytes`."""

    @wraps(function)
    def recalled(*args: P.args, **kwargs: P.kwargs) -> R:
        key = (function, args)
        found = MEMORY.find(key)
        if found is None:
            result = function(*args, **kwargs)
            MEMORY.keep(key, result, _LEAST + size_of(args) + size_of(result))
            return result
        answer: R = found[0]
        return answer

    return recalled


def size_of(tree: Any) -> int:
    """Bytes of the arrays in a tree."""
    if isinstance(tree, (list, tuple)):
        return sum(map(size_of, tree))
    if isinstance(tree, dict):
        return sum(map(size_of, tree.values()))
    return int(getattr(tree, "nbytes", 0)) if not isinstance(tree, bytes) else len(tree)
