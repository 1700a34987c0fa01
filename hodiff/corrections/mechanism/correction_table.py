"""`hodiff.corrections.table()`: the list of all corrections, which notebooks show as a table."""

from __future__ import annotations

from typing import NamedTuple

from hodiff import displays
from hodiff.corrections.mechanism.registry import listed_corrections
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
        header = ("torch function", "torch is", "by routes", "reason", "fixed in torch")
        rows = [
            (row.name, displays.Cell(row.kind, _TINTS[row.kind]), _routes(row), row.reason, row.mended) for row in self
        ]
        return displays.page(displays.element("b", f"{len(self):,} corrections"), displays.table(header, rows))


def _routes(row: Row) -> str:
    return "all routes" if row.routes == ROUTES else ", ".join(row.routes)


def table() -> CorrectionTable:
    """Return the table of corrections, with routes, reasons and sources.

    Returns:
        A list with a row for each rule in force, sorted by the torch function's name, which a notebook shows as a
        table. A row with a version in `mended` applies to older versions of torch only.

    Example:
        >>> import hodiff
        >>> row = next(row for row in hodiff.corrections.table() if row.name == "torch.nn.functional.relu")
        >>> row.kind, row.reason
        ('slow', 'the second derivative is zero, but is computed and added')
    """
    rows = {
        Row(each.name, each.kind, each.routes, each.reason, each.reference, each.mended)
        for each in listed_corrections()
    }
    return CorrectionTable(sorted(rows))
