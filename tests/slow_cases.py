"""Choose which cases of a long table run among the quick tests; the other cases are marked slow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], quick: Collection[Any] | Callable[[Any], bool], name: Any = str) -> list[Any]:
    """Return test parameters, marked slow unless the case is in `quick` or `quick(case)` is true."""
    chosen = quick if callable(quick) else lambda case: case in quick
    return [pytest.param(case, id=name(case), marks=[] if chosen(case) else [pytest.mark.slow]) for case in cases]


def thinned_pairs(rows: Iterable[Any], columns: Iterable[Any], by: int) -> list[tuple[Any, Any]]:
    """Return one pair in `by`, in a diagonal pattern: neighbouring rows meet different columns, and vice versa."""
    chosen = list(columns)
    return [(row, column) for i, row in enumerate(rows) for j, column in enumerate(chosen) if (i + j) % by == 0]


def backend_of(case: Any, cases: Iterable[Any]) -> str | bool:
    """Return the backend that `check` compiles a case with. Compilation is slow, so only every tenth case has one."""
    return "aot_eager" if case in list(cases)[::10] else False
