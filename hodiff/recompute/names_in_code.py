"""The names in code, by what it looks up: globals of its module, imports, or attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dis import get_instructions
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

# Class bodies load names by the last two instructions. A global that code binds counts, too: code may read it later.
_OF_GLOBALS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_OF_IMPORTS = {"IMPORT_NAME", "IMPORT_FROM"}


class Names(NamedTuple):
    """Names in a code object, and in the functions defined in it.

    Attributes:
        of_globals: Names that are looked up among the globals.
        of_imports: Modules that are imported when the code runs, and names that are imported from them.
        of_all: Names of all kinds, attributes among them.
    """

    of_globals: tuple[str, ...]
    of_imports: tuple[str, ...]
    of_all: tuple[str, ...]


def names_in(code: CodeType) -> Names:
    """Return the names in a code object."""
    try:
        return _remembered(code)
    except TypeError:  # code written by dynamo may have unhashable constants
        return _read(code)


def _read(code: CodeType) -> Names:
    codes = list(_codes_in(code))
    steps = [step for each in codes for step in get_instructions(each)]
    return Names(
        tuple(dict.fromkeys(step.argval for step in steps if step.opname in _OF_GLOBALS)),
        tuple(dict.fromkeys(step.argval for step in steps if step.opname in _OF_IMPORTS)),
        tuple(dict.fromkeys(name for each in codes for name in each.co_names)),
    )


# Reading instructions takes far longer than hashing code, and equal code has the same names.
_remembered = lru_cache(maxsize=4096)(_read)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
