"""Options at the boundary: counts, amounts, choices from a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hodiff.errors import InputError


def require_int(caller: str, argument: str, value: Any, least: int) -> None:
    """Refuse what is not an int of at least `least`.

    Args:
        caller: The public function, for the error message.
        argument: The argument's name, for the error message.
        value: The argument.
        least: The smallest allowed.

    Raises:
        InputError: If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{caller}: {argument}: expected an int of {least} or more, got {value!r}.")


def require_amount(caller: str, argument: str, value: Any, *, positive: bool = False) -> None:
    """Refuse what is not a finite number, zero or more.

    Args:
        caller: The public function, for the error message.
        argument: The argument's name, for the error message.
        value: The argument.
        positive: Whether zero is refused too.

    Raises:
        InputError: If it is anything else.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        kind = "a positive" if positive else "a nonnegative"
        raise InputError(f"{caller}: {argument}: expected {kind} finite number, got {value!r}.")


def require_choice(caller: str, argument: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse what is not one of the names.

    Args:
        caller: The public function, for the error message.
        argument: The argument's name, for the error message.
        value: The argument.
        choices: The names.

    Raises:
        InputError: If it is anything else.
    """
    names = list(choices)
    if value not in names:
        raise InputError(f"{caller}: {argument}: expected one of {', '.join(map(repr, names))}, got {value!r}.")
