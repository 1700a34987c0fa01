"""A report as HTML for notebooks: one escaped fragment, without scripts, style sheets or anything from outside."""

from __future__ import annotations

from html import escape

from hodiff.checks.report.data import FindingData, ReportData
from hodiff.checks.report.layout import SEVERITIES, Table, TableCell, by_severity, facts, heading, tables, verdict

# Text keeps the notebook's own colour, and these tints let the background through: both read in light and in dark.
_TINTS = {"error": "220, 50, 47", "warning": "203, 145, 0", "note": "38, 139, 210", "ok": "70, 150, 40"}

_CELL = "padding: 0.1em 0.7em; text-align: left; white-space: nowrap"
_MONO = "font-family: monospace; font-size: 0.9em"


def report_html(report: ReportData) -> str:
    """Write a whole report: verdict, findings, then the tables, folded if every comparison agreed."""
    worst = next((severity for severity, _ in by_severity(report.findings)), "ok")
    parts = [f"<p><b>check of {escape(report.title)}</b>: {_badge(verdict(report), worst)}</p>"]
    for severity, found in by_severity(report.findings):
        parts += [_finding(finding, severity) for finding in found]
    parts += [f"<p>note: {escape(note)}</p>" for note in report.notes]
    if report.entries:
        unfolded = "" if report.ok else " open"
        blocks = "".join(map(_table, tables(report.entries)))
        parts.append(f"<details{unfolded}><summary>{len(report.entries)} comparisons</summary>{blocks}</details>")
    return f'<div style="color: inherit; line-height: 1.4">{"".join(parts)}</div>'


def _finding(finding: FindingData, severity: str) -> str:
    name = escape(heading(finding) or SEVERITIES[severity])
    rows = "".join(
        f'<tr style="background: none"><td style="{_CELL}; vertical-align: top; opacity: 0.7">{escape(label)}</td>'
        f'<td style="padding: 0.1em 0.7em; text-align: left">{_fact(label, text)}</td></tr>'
        for label, text in facts(finding)
    )
    border = f"border-left: 0.3em solid rgb({_TINTS[severity]}); margin: 0.5em 0; padding-left: 0.6em"
    return f'<div style="{border}"><b>{name}</b> <small>{severity}</small><table>{rows}</table></div>'


def _fact(label: str, text: str) -> str:
    """Set code between backquotes, places and pages in a fixed pitch."""
    if label in {"at", "page"}:
        return f'<span style="{_MONO}">{escape(text)}</span>'
    pieces = escape(text).split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _table(table: Table) -> str:
    header = "".join(f'<th style="{_CELL}">{escape(text)}</th>' for text in table.header)
    rows = "".join(f'<tr style="background: none">{"".join(map(_cell, row))}</tr>' for row in table.rows)
    return f'<table style="{_MONO}; border-collapse: collapse"><tr style="background: none">{header}</tr>{rows}</table>'


def _cell(cell: TableCell) -> str:
    tint = f"; background: rgba({_TINTS['error']}, 0.25)" if cell.failed else ""
    return f'<td style="{_CELL}{tint}">{escape(cell.text)}</td>'


def _badge(text: str, severity: str) -> str:
    return f'<span style="background: rgba({_TINTS[severity]}, 0.25); padding: 0.1em 0.5em">{escape(text)}</span>'
