"""Forms of a report: text, HTML for notebooks (an escaped fragment without external resources), and strict JSON."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any, TextIO

from hodiff import displays
from hodiff.checks.report.data import Entry, FindingData, ReportData
from hodiff.checks.report.layout import SEVERITIES, Table, by_severity, facts, heading, tables, verdict
from hodiff.displays import TINTS, Cell, Html, badge, code, element, folded, page
from hodiff.errors import InputError

SCHEMA = "hodiff.report"
VERSION = 1

# JSON has no infinities; Python's float() reads these names.
_NAMES = {math.inf: "inf", -math.inf: "-inf"}


def report_to_json(report: ReportData, *, indent: int | None = None) -> str:
    """Write a report as an object in strict JSON, where "nan", "inf" and "-inf" are strings."""
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "title": report.title,
        "ok": report.ok,
        "codes": report.codes,
        "findings": [asdict(finding) for finding in report.findings],
        "entries": [{key: _strict(value) for key, value in asdict(entry).items()} for entry in report.entries],
        "notes": report.notes,
    }
    return json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=False)


def report_from_json(text: str) -> ReportData:
    """Read a report that `report_to_json` wrote; unknown fields of later versions are ignored."""
    content = _content(text)
    try:
        return ReportData(
            title=content["title"],
            entries=tuple(Entry(**_known(Entry, each, _entry_value)) for each in content["entries"]),
            findings=tuple(FindingData(**_known(FindingData, each, _finding_value)) for each in content["findings"]),
            notes=tuple(content["notes"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"Report.from_json: text: a part is missing or malformed ({error!r}).") from error


def _content(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"Report.from_json: text: expected JSON, as Report.to_json writes it; {error}.") from error
    known = (content.get("schema"), content.get("version")) if isinstance(content, dict) else (None, None)
    if known != (SCHEMA, VERSION):
        raise InputError(
            f"Report.from_json: text: expected schema {SCHEMA!r} of version {VERSION}, got {known[0]!r} of version "
            f"{known[1]!r}. Read it with the version of hodiff that wrote it, or run the check again."
        )
    return content


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return _NAMES.get(value, "nan")
    return value


def _entry_value(key: str, value: Any) -> Any:
    return float(value) if key in {"error", "tolerance"} and value is not None else value


def _finding_value(key: str, value: Any) -> Any:
    return tuple(value) if key == "evidence" else value


def _known(kind: Any, content: dict[str, Any], read: Any) -> dict[str, Any]:
    """Return the fields that this version has, so that later versions may add fields."""
    names = {field.name for field in fields(kind)}
    return {key: read(key, value) for key, value in content.items() if key in names}


def report_html(report: ReportData) -> str:
    """Return a whole report as HTML; the tables are folded if every comparison agreed."""
    worst = next((severity for severity, _ in by_severity(report.findings)), "ok")
    parts = [element("p", element("b", f"check of {report.title}"), ": ", badge(verdict(report), worst))]
    for severity, found in by_severity(report.findings):
        parts += [_finding(finding, severity) for finding in found]
    parts += [element("p", f"note: {note}") for note in report.notes]
    if report.entries:
        blocks = map(_table, tables(report.entries))
        parts.append(folded(f"{len(report.entries)} comparisons", *blocks, opened=not report.ok))
    return page(*parts)


def _finding(finding: FindingData, severity: str) -> Html:
    name = element("b", heading(finding) or SEVERITIES[severity])
    told = displays.facts((label, _fact(label, text)) for label, text in facts(finding))
    border = f"border-left: 0.3em solid rgb({TINTS[severity]}); margin: 0.5em 0; padding-left: 0.6em"
    return element("div", name, " ", element("small", severity), told, style=border)


def _fact(label: str, text: str) -> object:
    """Show code between backquotes, and the labels "at" and "page", in a fixed pitch."""
    if label in {"at", "page"}:
        return code(text)
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return text
    return element("span", *(element("code", piece) if i % 2 else piece for i, piece in enumerate(pieces)))


def _table(table: Table) -> Html:
    rows = [[Cell(cell.text, "error" if cell.failed else "") for cell in row] for row in table.rows]
    return displays.table(table.header, rows)


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
