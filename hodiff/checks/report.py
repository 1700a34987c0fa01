"""What a check found: rows of numbers, findings with remedies, one readable report."""

from dataclasses import dataclass
from itertools import groupby

from hodiff.errors import CheckError


@dataclass(frozen=True)
class Entry:
    """One comparison.

    Attributes:
        route: The route or check that was compared, such as ``"forward-over-reverse"`` or ``"vmap"``.
        order: Order of the derivative; 0 is the value.
        quantity: What it was compared in, such as ``"vs differences"``.
        error: Largest absolute difference over the scale of the derivative; None for pass-or-fail checks.
        tolerance: The relative error allowed; None for pass-or-fail checks.
        status: ``"ok"``, ``"skipped"``, or the kind of the finding that it leads to.
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
        """Whether this entry leads to a finding."""
        return self.status not in {"ok", "skipped"}


@dataclass(frozen=True)
class Finding:
    """One defect.

    Attributes:
        route: The routes or checks that show it, joined by commas.
        order: The lowest order at which it shows.
        kind: ``"wrong"``, ``"zero"``, ``"raises"``, ``"non-finite"``, ``"non-smooth"``, ``"imprecise"``,
            ``"float64"`` or ``"fails"``.
        message: What was measured.
        remedy: What to do about it.

    Example:
        >>> print(Finding("forward", 1, "wrong", "relative error 1.0e+00", "Compare jvp with backward."))
        [wrong] forward, order 1: relative error 1.0e+00
            remedy: Compare jvp with backward.
    """

    route: str
    order: int
    kind: str
    message: str
    remedy: str

    def __str__(self) -> str:
        """Two lines: what was measured and what to do."""
        return f"[{self.kind}] {self.route}, order {self.order}: {self.message}\n    remedy: {self.remedy}"


@dataclass(frozen=True)
class Report:
    """Everything that `hodiff.check` measured.

    Attributes:
        title: One line: what was checked, and where.
        entries: All comparisons, in the order in which they were made.
        findings: The defects; empty if every comparison agreed.
        notes: What is no defect and yet good to know, a sentence each.

    Example:
        >>> entry = Entry("reverse", 1, "vs differences", 1e-12, 1e-8, "ok")
        >>> report = Report("sin", (entry,), ())
        >>> report.ok
        True
        >>> print(report)
        check of sin: ok
        order  route    vs differences
        1      reverse  1.0e-12
    """

    title: str
    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def raise_on_failure(self) -> None:
        """Raise if there is a finding.

        Raises:
            CheckError: With the whole report as its text.
        """
        if not self.ok:
            raise CheckError(str(self))

    def __str__(self) -> str:
        """A table of relative errors, route by quantity, followed by the findings and the notes."""
        count = len(self.findings)
        verdict = "ok" if self.ok else f"{count} finding{'s' * (count != 1)}"
        parts = [f"check of {self.title}: {verdict}", *_tables(self.entries), *map(str, self.findings)]
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join(parts)


def _tables(entries: tuple[Entry, ...]) -> list[str]:
    """Neighbouring rows that share their columns share a table; all tables share their first columns."""
    rows: dict[tuple[int, str], dict[str, Entry]] = {}
    for entry in entries:
        rows.setdefault((entry.order, entry.route), {})[entry.quantity] = entry
    width = max((len(route) for _, route in rows), default=0)
    lines = []
    for quantities, group in groupby(rows.items(), key=lambda row: tuple(row[1])):
        lines.append(_line("order", "route".ljust(width), *quantities))
        for (order, route), cells in group:
            texts = [_cell(cells[q]).ljust(len(q)) for q in quantities]
            lines.append(_line(str(order).ljust(5), route.ljust(width), *texts))
    return lines


def _cell(entry: Entry) -> str:
    number = "" if entry.error is None else f"{entry.error:.1e}"
    status = "" if number and entry.status == "ok" else entry.status
    return f"{number} {status}".strip()


def _line(*cells: str) -> str:
    return "  ".join(cells).rstrip()
