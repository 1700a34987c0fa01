"""Reports and findings of a check, which print as text, HTML and JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from hodiff.checks.report.data import FindingData, ReportData
from hodiff.checks.report.formats import (
    WIDTH,
    finding_text,
    print_report,
    report_from_json,
    report_html,
    report_text,
    report_to_json,
)
from hodiff.checks.report.layout import summary
from hodiff.errors import CheckError


@dataclass(frozen=True)
class Finding(FindingData):
    """Defect that a check found.

    Attributes:
        route: The routes or checks that show it, joined by commas.
        order: The lowest order at which it shows.
        kind: ``"wrong"``, ``"zero"``, ``"raises"``, ``"non-finite"``, ``"non-smooth"``, ``"imprecise"``,
            ``"float64"`` or ``"fails"`` if comparisons show it, ``"seen"`` if only a probe shows it.
        message: The measurement.
        remedy: What to change.
        code: Code of the defect, a key of `hodiff.checks.findings.codes.CODES`.
        severity: ``"error"``, ``"warning"`` (it works here, and wastes or fails elsewhere) or ``"note"``.
        title: The defect, in a few words.
        cause: Why derivatives go wrong here, in one sentence with the evidence.
        evidence: Observations: arguments, routes, sizes of errors, saved tensors.
        location: Line of the source, such as ``"file.py:123"``; empty if it is unknown.
        condition: Condition under which the defect shows, such as ``"where an element of input 0 is 0"``; empty if it
            shows at the given inputs.

    Example:
        >>> print(Finding("forward", 1, "wrong", "relative error 1.0e+00", "Compare jvp with backward."))
        [wrong] forward, order 1: relative error 1.0e+00
            remedy: Compare jvp with backward.
    """

    def __str__(self) -> str:
        """Return the defect, its measurement and its remedy as text."""
        return finding_text(self)


@dataclass(frozen=True)
class Report(ReportData):
    """Result of `hodiff.check`.

    Attributes:
        title: One line with the name and the shapes of the checked function.
        entries: All comparisons, in the order in which they were made.
        findings: The defects, errors first; empty if every comparison agreed and no probe found anything.
        notes: Useful facts that are no defects, one sentence per note.

    Example:
        >>> from hodiff.checks import Entry
        >>> entry = Entry("reverse", 1, "vs differences", 1e-12, 1e-8, "ok")
        >>> report = Report("sin", (entry,), ())
        >>> report.ok
        True
        >>> report.summary
        'sin: ok, differences agree to 1e-12'
        >>> print(report)
        check of sin: ok
        order  route    vs differences
        1      reverse  1.0e-12
    """

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings about derivatives that are wrong or missing."""
        return self._of_severity("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings about code that works here, and wastes or fails elsewhere."""
        return self._of_severity("warning")

    @property
    def summary(self) -> str:
        """One line: the verdict, agreement with differences and SciPy, and results of torch's checks."""
        return summary(self)

    def _of_severity(self, severity: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def raise_on_failure(self) -> None:
        """Raise if there is a finding of severity "error".

        Raises:
            CheckError: An error whose text is the whole report.
        """
        if not self.ok:
            raise CheckError(str(self))

    def render(self, *, color: bool = False, width: int = WIDTH) -> str:
        """Write the report as text: verdict, table of relative errors, findings by severity, notes.

        Args:
            color: Whether to mark failures by the colours of ANSI terminals.
            width: Number of characters at which sentences are wrapped.

        Returns:
            Lines of text; ``str(report)`` has no colours and the default width.
        """
        return report_text(self, color=color, width=width)

    def print(self, file: TextIO | None = None) -> None:
        """Print the report, in colours if on a terminal and NO_COLOR is not set.

        Args:
            file: Stream to write to; standard output by default.
        """
        print_report(self, sys.stdout if file is None else file)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the report as strict JSON, which includes its schema and version.

        Args:
            indent: Spaces for each level, or None for one line.

        Returns:
            An object with ``title``, ``ok``, ``codes``, ``findings``, ``entries`` and ``notes``. Errors are numbers,
            or the strings "nan", "inf" and "-inf", which JSON lacks.
        """
        return report_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            An equal report.

        Raises:
            InputError: If the text is not such JSON, or has another version.

        Example:
            >>> from hodiff.checks import Entry
            >>> report = Report("sin", (Entry("reverse", 1, "vs differences", 1e-12, 1e-8, "ok"),), ())
            >>> Report.from_json(report.to_json()) == report
            True
        """
        read = report_from_json(text)
        return cls(read.title, read.entries, tuple(Finding(**vars(each)) for each in read.findings), read.notes)

    def __str__(self) -> str:
        """Return a table of relative errors, route by quantity, followed by the findings and the notes."""
        return report_text(self)

    def _repr_html_(self) -> str:
        return report_html(self)
