"""A line that says what a check is at, once it takes longer than one waits without asking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

# Seconds before the line appears.
DELAY = 2.0

_LINE: ContextVar[Any] = ContextVar("line", default=None)


@contextmanager
def told(name: str) -> Iterator[None]:
    """Tell, on a terminal, what happens within; a check inside of another tells on the same line."""
    if _LINE.get() is not None:
        yield
        return
    with tqdm(desc=name, unit=" derivatives", delay=DELAY, leave=False, disable=None) as line:
        token = _LINE.set(line)
        try:
            yield
        finally:
            _LINE.reset(token)


def advance(what: str) -> None:
    """One more step is about to be taken."""
    line = _LINE.get()
    if line is not None:
        line.set_postfix_str(what, refresh=False)
        line.update()
