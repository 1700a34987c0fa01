"""A report as text: a table of errors, then the findings, errors apart from warnings and notes."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from hodiff.checks.report.report import Entry, Finding, Report

PAGE = "docs/findings.md"
WIDTH = 110

# The plural, and the colour in terminals, of each severity; the order is that of the report.
SEVERITIES = {"error": ("errors", "31"), "warning": ("warnings", "33"), "note": ("notes", "36")}

_BOLD, _DIM = "1", "2"


@dataclass(frozen=True)
class Cell:
    """What stands at one place of a table."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of one header."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def widths(self) -> list[int]:
        """Number of characters that each column needs."""
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


def _row(order: int, route: str, cells: dict[str, Entry]) -> tuple[Cell, ...]:
    return (Cell(str(order)), Cell(route), *(Cell(_text(entry), entry.failed) for entry in cells.values()))


def _text(entry: Entry) -> str:
    number = "" if entry.error is None else f"{entry.error:.1e}"
    status = "" if number and entry.status == "ok" else entry.status
    return f"{number} {status}".strip()


def verdict(report: Report) -> str:
    """Count the findings of each severity, with their codes: ``"1 error (HD104), 2 warnings (HD501, HD502)"``."""
    counts = [_count(severity, found) for severity, found in by_severity(report.findings) if severity != "note"]
    return ", ".join(["ok"] * report.ok + counts)


def by_severity(findings: Iterable[Finding]) -> Iterator[tuple[str, tuple[Finding, ...]]]:
    """Sort findings by severity, the worst first, and leave out what there is none of.

    Yields:
        A severity and its findings.
    """
    found = tuple(findings)
    for severity in SEVERITIES:
        some = tuple(finding for finding in found if finding.severity == severity)
        if some:
            yield severity, some


def _count(severity: str, found: tuple[Finding, ...]) -> str:
    codes = ", ".join(dict.fromkeys(finding.code for finding in found if finding.code))
    noun = severity if len(found) == 1 else SEVERITIES[severity][0]
    return f"{len(found)} {noun}" + f" ({codes})" * bool(codes)


def facts(finding: Finding) -> tuple[tuple[str, str], ...]:
    """What a finding says, as labels and texts; what is empty or said already is left out."""
    cause = finding.cause.strip()
    shown = f"[{finding.kind}] {finding.route}, order {finding.order}"
    if finding.message and finding.message not in cause:
        shown = f"{shown}: {finding.message}"
    elif finding.kind == "seen" and cause:
        # No comparison shows it, and what a probe saw is the cause.
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


def _anchor(finding: Finding) -> str:
    """What renderers of Markdown call the section `CODE: title`: lower case, hyphens, no punctuation."""
    heading = f"{finding.code}: {finding.title}".lower()
    return "-".join(re.sub(r"[^\w\s-]", "", heading).split())


def finding_text(finding: Finding, *, color: bool = False, width: int = WIDTH) -> str:
    """Write one finding: its code and title, and a labelled line for each fact, wrapped at ``width``."""
    title = _paint(f"{finding.code} {finding.title}".strip(), f"{_BOLD};{SEVERITIES[finding.severity][1]}", color)
    lines = [title] if title else []
    for label, text in facts(finding):
        # What was measured needs no label: its kind stands in brackets before it.
        lead = "" if label == "shown by" else f"{label}: "
        lines += _wrapped(f"{lead}{text}", width, indent="    " if lines else "")
    return "\n".join(lines)


def report_text(report: Report, *, color: bool = False, width: int = WIDTH) -> str:
    """Write a whole report.

    Args:
        report: What a check found.
        color: Whether to mark failures by the colours of ANSI terminals.
        width: Where the sentences of findings are wrapped; tables are as wide as they have to be.

    Returns:
        Lines without trailing spaces: title and verdict, tables, findings by severity, notes.
    """
    worst = next((severity for severity, _ in by_severity(report.findings)), "note")
    hue = "32" if report.ok and worst == "note" else SEVERITIES[worst][1]
    parts = [f"check of {report.title}: {_paint(verdict(report), hue, color)}"]
    parts += _table_lines(tables(report.entries), color)
    for severity, found in by_severity(report.findings):
        parts += ["", _paint(f"{SEVERITIES[severity][0]}:", _BOLD, color)]
        parts += [finding_text(finding, color=color, width=width) for finding in found]
    for note in report.notes:
        parts += _wrapped(f"note: {note}", width, indent="")
    return "\n".join(parts)


def print_report(report: Report, stream: TextIO) -> None:
    """Write a report and a line end to a stream, as wide and as coloured as that one allows."""
    width = min(shutil.get_terminal_size().columns, WIDTH) if stream.isatty() else WIDTH
    stream.write(report_text(report, color=wants_color(stream), width=width) + "\n")


def wants_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user did not set NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _table_lines(blocks: tuple[Table, ...], color: bool) -> Iterator[str]:
    """All tables share the width of the routes, so that they read as one."""
    routes = max((block.widths()[1] for block in blocks), default=0)
    for block in blocks:
        widths = block.widths()
        widths[1] = routes
        yield _line([_paint(text, _DIM, color) for text in _padded(block.header, widths)])
        for row in block.rows:
            texts = _padded([cell.text for cell in row], widths)
            red = SEVERITIES["error"][1]
            yield _line([_paint(text, red, color and cell.failed) for text, cell in zip(texts, row, strict=True)])


def _padded(texts: Iterable[str], widths: list[int]) -> list[str]:
    """Pad all but the last, which would only trail."""
    padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
    return [*padded[:-1], padded[-1].rstrip()]


def _line(cells: list[str]) -> str:
    return "  ".join(cells).rstrip()


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        # A path, a route or a line of code is of use only in one piece.
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paint(text: str, hue: str, color: bool) -> str:
    return f"\x1b[{hue}m{text}\x1b[0m" if color and text else text
