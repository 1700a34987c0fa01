"""Reading and writing of reports as strict JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import Any

from hodiff.checks.report.data import Entry, FindingData, ReportData
from hodiff.errors import InputError

SCHEMA = "hodiff.report"
VERSION = 1

# JSON has no infinities; Python's float() reads these names.
_NAMES = {math.inf: "inf", -math.inf: "-inf"}


def report_to_json(report: ReportData, *, indent: int | None = None) -> str:
    """Write a report as JSON.

    Args:
        report: The report.
        indent: Spaces for each level, or None for one line.

    Returns:
        An object with ``schema``, ``version``, ``title``, ``ok``, ``codes``, ``findings``, ``entries`` and
        ``notes``. Errors and tolerances are numbers, or the strings "nan", "inf" and "-inf", which JSON lacks.
    """
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
            f"{known[1]!r}. Read it with the hodiff that wrote it, or run the check again."
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
