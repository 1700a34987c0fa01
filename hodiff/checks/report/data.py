"""Data of a report: comparisons and findings, without their presentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Comparison of one derivative.

    Attributes:
        route: The route or check that was compared, such as ``"forward-over-reverse"`` or ``"vmap"``.
        order: Order of the derivative; 0 is the value.
        quantity: The comparison, such as ``"vs differences"``.
        error: Largest absolute difference over the scale of the derivative; None for pass-or-fail checks.
        tolerance: The relative error allowed; None for pass-or-fail checks.
        status: ``"ok"``, ``"skipped"``, ``"gap"`` (a surrogate's derivative, which is measured and not judged), or the
            kind of the finding that it leads to.
        detail: First line of the exception, or why an entry was skipped.
    """

    route: str
    order: int
    quantity: str
    error: float | None
    tolerance: float | None
    status: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether the entry leads to a finding."""
        return self.status not in {"ok", "skipped", "gap"}


@dataclass(frozen=True)
class FindingData:
    """Data of a defect; `Finding` documents the fields."""

    route: str
    order: int
    kind: str
    message: str
    remedy: str
    code: str = ""
    severity: str = "error"
    title: str = ""
    cause: str = ""
    evidence: tuple[str, ...] = ()
    location: str = ""
    condition: str = ""


@dataclass(frozen=True)
class ReportData:
    """Data of a check; `Report` documents the fields."""

    title: str
    entries: tuple[Entry, ...]
    findings: tuple[FindingData, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity "error"."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of the findings, in order."""
        return tuple(finding.code for finding in self.findings)
