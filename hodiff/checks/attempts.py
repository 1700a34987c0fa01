"""Calls that may raise: an exception in a checked function is a finding and does not end the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Number of characters of a message that are kept.
_LONGEST = 240


@dataclass(frozen=True)
class Failure:
    """Result of a computation that raised: the exception's type and the first line of its message."""

    message: str


Outcome = Tensor | Failure


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; return a `Failure` if it raises."""
    try:
        return function(*args)
    except Exception as error:
        return Failure(first_line(error))


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[0]
    # Long messages end after a whole word.
    return f"{type(error).__name__}: {line if len(line) <= _LONGEST else line[:_LONGEST].rpartition(' ')[0] + ' …'}"
