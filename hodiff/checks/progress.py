"""Progress line of a check, shown once the check takes longer than two seconds."""

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
def progress_line(name: str) -> Iterator[None]:
    """Show a progress line on a terminal; a check inside of another check shares its line."""
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
    """Advance the progress line by one step, and name that step."""
    line = _LINE.get()
    if line is not None:
        line.set_postfix_str(what, refresh=False)
        line.update()
