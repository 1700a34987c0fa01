"""HTML of a report for notebooks: an escaped fragment without scripts, style sheets or external resources."""

from __future__ import annotations

from hodiff.checks.report.data import FindingData, ReportData
from hodiff.checks.report.layout import SEVERITIES, Table, by_severity, facts, heading, tables, verdict
from hodiff.displays import elements
from hodiff.displays.elements import TINTS, Cell, Html, badge, code, element, folded, page


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
    told = elements.facts((label, _fact(label, text)) for label, text in facts(finding))
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
    return elements.table(table.header, rows)
