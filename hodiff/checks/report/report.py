"""What a check gives its user: findings and a report that show themselves as text, HTML and JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from hodiff.checks.report.as_html import report_html
from hodiff.checks.report.as_json import report_from_json, report_to_json
from hodiff.checks.report.as_text import WIDTH, finding_text, print_report, report_text
from hodiff.checks.report.data import FindingData, ReportData
from hodiff.checks.report.layout import summary
from hodiff.errors import CheckError


@dataclass(frozen=True)
class Finding(FindingData):
    """One defect.

    Attributes:
        route: The routes or checks that show it, joined by commas.
        order: The lowest order at which it shows.
        kind: ``"wrong"``, ``"zero"``, ``"raises"``, ``"non-finite"``, ``"non-smooth"``, ``"imprecise"``,
            ``"float64"`` or ``"fails"`` for what comparisons show, ``"seen"`` for what a probe shows alone.
        message: What was measured.
        remedy: What to do about it.
        code: Which defect it is, a key of `hodiff.checks.findings.codes.CODES`.
        severity: ``"error"``, ``"warning"`` (it works here, and wastes or fails elsewhere) or ``"note"``.
        title: What it is, in a few words.
        cause: Why derivatives go wrong here, in one sentence with the evidence.
        evidence: What was seen: arguments, routes, sizes of errors, saved tensors.
        location: Where in the source, as ``"file.py:123"``; empty where it cannot be told.
        condition: Under which condition it shows, as ``"where an element of input 0 is 0"``; empty at the given inputs.

    Example:
        >>> print(Finding("forward", 1, "wrong", "relative error 1.0e+00", "Compare jvp with backward."))
        [wrong] forward, order 1: relative error 1.0e+00
            remedy: Compare jvp with backward.
    """

    def __str__(self) -> str:
        """What it is, what was measured, and what to do."""
        return finding_text(self)


@dataclass(frozen=True)
class Report(ReportData):
    """Everything that `hodiff.check` measured.

    Attributes:
        title: One line: what was checked, and where.
        entries: All comparisons, in the order in which they were made.
        findings: The defects, errors first; empty if every comparison agreed and no probe saw anything.
        notes: What is no defect and yet good to know, a sentence each.

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
        """The findings that say that something is wrong or missing."""
        return self._of_severity("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that say that something works here, and wastes or fails elsewhere."""
        return self._of_severity("warning")

    @property
    def summary(self) -> str:
        """One line: the verdict, the largest relative distances from differences and from SciPy, torch's checks."""
        return summary(self)

    def _of_severity(self, severity: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def raise_on_failure(self) -> None:
        """Raise if there is a finding of severity "error".

        Raises:
            CheckError: With the whole report as its text.
        """
        if not self.ok:
            raise CheckError(str(self))

    def render(self, *, color: bool = False, width: int = WIDTH) -> str:
        """Write the report as text: verdict, table of relative errors, findings by severity, notes.

        Args:
            color: Whether to mark failures by the colours of ANSI terminals.
            width: Where sentences are wrapped.

        Returns:
            Lines of text; ``str(report)`` is the same without colours.
        """
        return report_text(self, color=color, width=width)

    def print(self, file: TextIO | None = None) -> None:
        """Print the report, in colours if on a terminal and NO_COLOR is not set.

        Args:
            file: Where to; standard output by default.
        """
        print_report(self, sys.stdout if file is None else file)

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the report as strict JSON; its schema and version are named in it.

        Args:
            indent: Spaces for each level, or None for one line.

        Returns:
            An object with ``title``, ``ok``, ``codes``, ``findings``, ``entries`` and ``notes``. Errors are numbers;
            those that JSON lacks are the strings "nan", "inf" and "-inf".
        """
        return report_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            An equal report.

        Raises:
            InputError: If it is no such JSON, or of another version.

        Example:
            >>> from hodiff.checks import Entry
            >>> report = Report("sin", (Entry("reverse", 1, "vs differences", 1e-12, 1e-8, "ok"),), ())
            >>> Report.from_json(report.to_json()) == report
            True
        """
        read = report_from_json(text)
        return cls(read.title, read.entries, tuple(Finding(**vars(each)) for each in read.findings), read.notes)

    def __str__(self) -> str:
        """A table of relative errors, route by quantity, followed by the findings and the notes."""
        return report_text(self)

    def _repr_html_(self) -> str:
        return report_html(self)
