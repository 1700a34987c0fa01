"""Text of a report: a table of errors, then the findings by severity."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import TextIO

from hodiff.checks.report.data import FindingData, ReportData
from hodiff.checks.report.layout import SEVERITIES, Table, by_severity, facts, heading, tables, verdict

WIDTH = 110

# Codes of ANSI terminals.
_BOLD, _DIM = "1", "2"
_COLORS = {"error": "31", "warning": "33", "note": "36", "ok": "32"}


def finding_text(finding: FindingData, *, color: bool = False, width: int = WIDTH) -> str:
    """Return one finding as text: its code and title, and a labelled line for each fact, wrapped at ``width``."""
    title = _paint(heading(finding), f"{_BOLD};{_COLORS[finding.severity]}", color)
    lines = [title] if title else []
    for label, text in facts(finding):
        # A measurement needs no label, as it begins with its kind in brackets.
        lead = "" if label == "shown by" else f"{label}: "
        lines += _wrapped(f"{lead}{text}", width, indent="    " if lines else "")
    return "\n".join(lines)


def report_text(report: ReportData, *, color: bool = False, width: int = WIDTH) -> str:
    """Return a report as wrapped text: title, verdict, tables, findings and notes; failures may be coloured."""
    worst = next((severity for severity, _ in by_severity(report.findings)), "note")
    hue = _COLORS["ok"] if report.ok and worst == "note" else _COLORS[worst]
    parts = [f"check of {report.title}: {_paint(verdict(report), hue, color)}"]
    parts += _table_lines(tables(report.entries), color)
    for severity, found in by_severity(report.findings):
        parts += ["", _paint(f"{SEVERITIES[severity]}:", _BOLD, color)]
        parts += [finding_text(finding, color=color, width=width) for finding in found]
    for note in report.notes:
        parts += _wrapped(f"note: {note}", width, indent="")
    return "\n".join(parts)


def print_report(report: ReportData, stream: TextIO) -> None:
    """Write a report and a line end to a stream, in the width and colours of its terminal."""
    width = min(shutil.get_terminal_size().columns, WIDTH) if stream.isatty() else WIDTH
    stream.write(report_text(report, color=wants_color(stream), width=width) + "\n")


def wants_color(stream: TextIO) -> bool:
    """Whether the stream is a terminal whose user did not set NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _table_lines(blocks: tuple[Table, ...], color: bool) -> Iterator[str]:
    """Yield the lines of all tables, which share the width of the column of routes."""
    routes = max((block.widths()[1] for block in blocks), default=0)
    for block in blocks:
        widths = block.widths()
        widths[1] = routes
        yield _line([_paint(text, _DIM, color) for text in _padded(block.header, widths)])
        for row in block.rows:
            texts = _padded([cell.text for cell in row], widths)
            red = _COLORS["error"]
            yield _line([_paint(text, red, color and cell.failed) for text, cell in zip(texts, row, strict=True)])


def _padded(texts: Iterable[str], widths: list[int]) -> list[str]:
    """Pad all texts but the last."""
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
        # Paths, routes and lines of code must stay in one piece.
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paint(text: str, hue: str, color: bool) -> str:
    return f"\x1b[{hue}m{text}\x1b[0m" if color and text else text
