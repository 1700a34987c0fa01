"""Layout shared by text and HTML: the verdict, tables of comparisons, and the facts of a finding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from hodiff.checks.report.data import Entry, FindingData, ReportData

PAGE = "docs/reference/findings.md"

# The plural of each severity; the order is that of the report.
SEVERITIES = {"error": "errors", "warning": "warnings", "note": "notes"}

# Comparisons with oracles that do not use automatic differentiation, and the oracles' names.
TRUTHS = {"vs differences": "differences", "vs SciPy": "SciPy's Hessians"}


@dataclass(frozen=True)
class TableCell:
    """Cell of a table."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Table:
    """Table with one header."""

    header: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]

    def widths(self) -> list[int]:
        """Return the number of characters that each column needs."""
        columns = zip(self.header, *([cell.text for cell in row] for row in self.rows), strict=True)
        return [max(map(len, column)) for column in columns]


def tables(entries: Iterable[Entry]) -> tuple[Table, ...]:
    """Arrange comparisons as route by quantity; neighbouring rows that share their columns share a table."""
    rows: dict[tuple[int, str], dict[str, Entry]] = {}
    for entry in entries:
        rows.setdefault((entry.order, entry.route), {})[entry.quantity] = entry
    return tuple(
        Table(("order", "route", *quantities), tuple(_row(order, route, cells) for (order, route), cells in group))
        for quantities, group in groupby(rows.items(), key=lambda row: tuple(row[1]))
    )


def _row(order: int, route: str, cells: dict[str, Entry]) -> tuple[TableCell, ...]:
    return (
        TableCell(str(order)),
        TableCell(route),
        *(TableCell(_text(entry), entry.failed) for entry in cells.values()),
    )


def _text(entry: Entry) -> str:
    number = "" if entry.error is None else f"{entry.error:.1e}"
    status = "" if number and entry.status == "ok" else entry.status
    return f"{number} {status}".strip()


def verdict(report: ReportData) -> str:
    """Count the findings of each severity, with their codes: ``"1 error (HD104), 2 warnings (HD501, HD502)"``."""
    counts = [_count(severity, found) for severity, found in by_severity(report.findings) if severity != "note"]
    return ", ".join(["ok"] * report.ok + counts)


def summary(report: ReportData) -> str:
    """Return one line: the verdict, agreement with differences and SciPy, and results of torch's checks."""
    parts = [f"{report.title}: {verdict(report)}"]
    for quantity, name in TRUTHS.items():
        compared = [entry for entry in report.entries if entry.quantity == quantity and entry.error is not None]
        worst = max((entry.error for entry in compared if entry.failed and entry.error is not None), default=None)
        if worst is not None:
            parts.append(f"{name} disagree by {worst:.0e}")
        elif compared:
            parts.append(f"{name} agree to {max(entry.error or 0.0 for entry in compared):.0e}")
        elif any(entry.quantity == quantity for entry in report.entries):
            parts.append(f"{name} tell nothing")
    for check in ("gradcheck", "gradgradcheck"):
        statuses = {entry.status for entry in report.entries if entry.route == check}
        if statuses:
            parts.append(f"{check} {'passes' if statuses == {'ok'} else 'fails'}")
    return ", ".join(parts)


def by_severity(findings: Iterable[FindingData]) -> Iterator[tuple[str, tuple[FindingData, ...]]]:
    """Yield each severity that has findings, with its findings, the worst severity first."""
    found = tuple(findings)
    for severity in SEVERITIES:
        some = tuple(finding for finding in found if finding.severity == severity)
        if some:
            yield severity, some


def _count(severity: str, found: tuple[FindingData, ...]) -> str:
    codes = ", ".join(dict.fromkeys(finding.code for finding in found if finding.code))
    noun = severity if len(found) == 1 else SEVERITIES[severity]
    return f"{len(found)} {noun}" + f" ({codes})" * bool(codes)


def heading(finding: FindingData) -> str:
    """Return a finding's code, title and condition."""
    return " ".join(part for part in (finding.code, finding.title, finding.condition) if part)


def facts(finding: FindingData) -> tuple[tuple[str, str], ...]:
    """Return a finding as pairs of label and text, without empty or repeated texts."""
    cause = finding.cause.strip()
    shown = f"[{finding.kind}] {finding.route}, order {finding.order}"
    if finding.message and finding.message not in cause:
        shown = f"{shown}: {finding.message}"
    elif finding.kind == "seen" and cause:
        # No comparison shows this defect, and the cause states what a probe saw.
        shown = ""
    evidence = [each for each in finding.evidence if each not in cause and each not in shown]
    pairs = (
        ("cause", cause),
        ("shown by", shown),
        *(("evidence", each) for each in evidence),
        ("at", finding.location),
        ("remedy", finding.remedy),
        ("page", f"{PAGE}#{_anchor(finding)}" if finding.code else ""),
    )
    return tuple((label, text) for label, text in pairs if text)


def _anchor(finding: FindingData) -> str:
    """Return Markdown's anchor of the section `CODE: title`: lower case, hyphens, no punctuation."""
    heading = f"{finding.code}: {finding.title}".lower()
    return "-".join(re.sub(r"[^\w\s-]", "", heading).split())
