"""Construction of findings: the fields that follow from a code and from the failed comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hodiff.checks.findings.codes import CODES
from hodiff.checks.report.data import Entry
from hodiff.checks.report.layout import SEVERITIES
from hodiff.checks.report.report import Finding

_WORDS = {"raises": "raises", "non-finite": "is not finite", "non-smooth": "has no two-sided value"}


def make_finding(
    code: str,
    failed: Sequence[Entry],
    cause: str,
    evidence: Iterable[str],
    location: str,
    *,
    remedy: str = "",
    message: str = "",
    severity: str = "",
    route: str = "",
) -> Finding:
    """Return the finding of a code; by default its fields are those of the code and of the failed comparisons."""
    defect = CODES[code]
    return Finding(
        route=route or routes_of(failed),
        order=min((entry.order for entry in failed), default=0),
        kind=failed[0].status if failed else "seen",
        message=message or largest_error(failed),
        remedy=remedy or defect.remedy,
        code=code,
        severity=severity or defect.severity,
        title=defect.title,
        cause=cause,
        evidence=tuple(evidence),
        location=location,
    )


def worst_severity(severities: Iterable[str]) -> str:
    """Return the worst of some severities."""
    return min(severities, key=list(SEVERITIES).index)


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by severity, the worst first, then by code."""
    return tuple(sorted(findings, key=lambda finding: (list(SEVERITIES).index(finding.severity), finding.code)))


def errors_by_route(failed: Sequence[Entry]) -> tuple[str, ...]:
    """Return each route's message at its lowest order; routes with equal messages are joined."""
    first: dict[str, Entry] = {}
    for entry in sorted(failed, key=lambda entry: entry.order):
        first.setdefault(entry.route, entry)
    groups: dict[str, list[str]] = {}
    for route, entry in first.items():
        groups.setdefault(largest_error([entry]), []).append(route)
    return tuple(f"{', '.join(routes)}: {message}" for message, routes in groups.items())


def largest_error(failed: Sequence[Entry]) -> str:
    """Return the largest error of the comparisons, or the first message if there are no errors."""
    details = [entry.detail for entry in failed if entry.detail]
    compared = [entry for entry in failed if entry.error is not None and not entry.detail]
    if not compared:
        return details[0] if details else failed[0].status
    worst = max(compared, key=lambda entry: entry.error or 0.0)
    return f"relative error {worst.error:.1e}, tolerance {worst.tolerance:.1e}"


def describe_failures(failed: Sequence[Entry]) -> str:
    """Return the kinds of failure in words: "is wrong, raises"."""
    return ", ".join(dict.fromkeys(_WORDS.get(entry.status, f"is {entry.status}") for entry in failed))


def routes_of(failed: Sequence[Entry]) -> str:
    """Return the names of the routes, without repetition."""
    return ", ".join(dict.fromkeys(entry.route for entry in failed))


def statuses(failed: Sequence[Entry]) -> set[str]:
    """Return the kinds of failure."""
    return {entry.status for entry in failed}
