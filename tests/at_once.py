"""Which cases of a long table run at once; the slow tests run the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def some_at_once(cases: Iterable[Any], soon: Collection[Any] | Callable[[Any], bool], name: Any = str) -> list[Any]:
    """Parameters of a test: those that are `soon` at once, or for which it says so, and the others as slow ones."""
    chosen = soon if callable(soon) else lambda case: case in soon
    return [pytest.param(case, id=name(case), marks=[] if chosen(case) else [pytest.mark.slow]) for case in cases]


def in_turn(rows: Iterable[Any], columns: Iterable[Any], by: int) -> list[tuple[Any, Any]]:
    """Of all pairs one in `by`; neighbouring rows meet other columns, and neighbouring columns other rows."""
    chosen = list(columns)
    return [(row, column) for i, row in enumerate(rows) for j, column in enumerate(chosen) if (i + j) % by == 0]


def backend_of(case: Any, cases: Iterable[Any]) -> str | bool:
    """What `check` compiles a case with: to compile takes far longer than all else, so that a fifth of them is."""
    return "aot_eager" if case in list(cases)[::5] else False
