"""One call in several threads at once, often enough that unlocked shared state fails."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

THREADS = 4


def in_threads(call: Callable[[Any], Any], arguments: Sequence[Any], times: int) -> list[Any]:
    """Call the function in several threads, for each argument in turn; return results and exceptions."""

    def attempt(argument: Any) -> Any:
        try:
            return call(argument)
        except Exception as error:
            return error

    with _frequent_switches(), ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(attempt, [arguments[i % len(arguments)] for i in range(times)]))


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Make Python switch threads a hundred times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
