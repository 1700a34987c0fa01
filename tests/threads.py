"""The same call in several threads at once, often enough that what they share without a lock goes wrong."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

THREADS = 4


def in_threads(call: Callable[[Any], Any], arguments: Sequence[Any], times: int) -> list[Any]:
    """What a call returns for each argument in turn, or the error that it raises, from several threads."""

    def attempt(argument: Any) -> Any:
        try:
            return call(argument)
        except Exception as error:
            return error

    with _hasty(), ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(attempt, [arguments[i % len(arguments)] for i in range(times)]))


@contextmanager
def _hasty() -> Iterator[None]:
    """Let Python change threads a hundred times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
