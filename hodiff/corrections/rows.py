"""The table of corrections, with its display in notebooks."""

from __future__ import annotations

from typing import NamedTuple

from hodiff.displays import Cell, element, page, table
from hodiff.routes import ROUTES

_TINTS = {"wrong": "error", "missing": "warning", "slow": "note"}


class Row(NamedTuple):
    """A row of `hodiff.corrections.table()`; see `Correction` for the fields."""

    name: str
    kind: str
    routes: tuple[str, ...]
    reason: str
    reference: str
    mended: str = ""


class CorrectionTable(list[Row]):
    """The rows of `hodiff.corrections.table()`, a list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        header = ("torch function", "torch is", "by", "what is amiss", "mended in torch")
        rows = [(row.name, Cell(row.kind, _TINTS[row.kind]), _routes(row), row.reason, row.mended) for row in self]
        return page(element("b", f"{len(self):,} corrections"), table(header, rows))


def _routes(row: Row) -> str:
    return "all routes" if row.routes == ROUTES else ", ".join(row.routes)
