"""Markdown page of the audit, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from hodiff.audit.mutated.mutated_audit import Count, MutatedAudit
from hodiff.checks.torch_verdicts import AUDITED_ROUTES, STATUSES, TITLES, TORCH, AuditTable, Verdict, Verdicts


def grid(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table with a header of titles."""
    lines = [list(titles), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_MESSAGE = 110

_HOW = """\
The audit tests the second derivatives of torch's operators by each route, and third derivatives in reverse mode.
Operators and samples are from torch's own database (`torch.testing`), in float64. `python -m hodiff audit` writes this
page, and `python -m hodiff audit --op NAME` prints the rows of one operator. With `--script`, it prints a script of
torch alone that reproduces the first defect of the operator, for a bug report. `hodiff/checks/data` has the whole table
as JSON. [upstream.md](upstream.md) lists the faults with their reports.

The audit contracts the outputs of up to six samples of each operator to a scalar, such that the incoming gradient
depends on the input, and differentiates along random directions. It compares each derivative with extrapolated
differences of the next lower order, and the gradient with differences of the value, so that no derivative is its own
reference. Matrices that must be symmetric, triangular or positive definite are made so inside the function. Errors are
relative to the largest element of the derivative. If the true derivative is 0, the error is divided by the rounding
level of the lower orders instead, so such numbers are large and are not relative errors. Cells with "true value ≈ 0" do
not show them. The verdict of an operator is that of its worst sample.

- **right**: agrees with the differences; **wrong**: silently disagrees; **non-finite**: NaN or infinite although the
  derivative is finite; **raises**: raises an error; **timed out**: no result within the time limit.
- **not smooth**: one-sided differences disagree at every sample, so there is no reference.
- **random**: two evaluations differ. If such an operator is wrong or raises with a fixed seed, it is listed as such.
- **not differentiable**: no floating-point output, an output in 16 bits, sparse tensors, only complex inputs, or an
  operator for which torch declares no derivative.
"""

# Abbreviations of the routes in tables.
_SHORT = dict(zip(AUDITED_ROUTES, ("rr", "fr", "rf", "ff", "third"), strict=True))

_VERSIONS = """\
The table lists derivatives that are wrong or missing with torch alone, in the audited versions. rr, fr, rf and ff are
the routes reverse-over-reverse, forward-over-reverse, reverse-over-forward and forward-over-forward; third is the third
order in reverse mode. `hodiff.preflight` uses the installed version, or the nearest older version.
"""

_INVENTED = """\
`python -m hodiff audit --mutate` tests calls that the database does not contain. It changes each sample in one way. One
argument gets a batch, a dimension of size 1 or 0, zeros, ties, equal slices, large, small or subnormal numbers, close
eigenvalues, another memory layout, or repeated indices; or the call gets another option, keywords, or float32.

The audit compares the value with torch's, and derivatives of order 1 to 3 by every route with differences. It counts a
call if differences with the two largest steps agree, and if they are linear in the direction. It counts an error if the
error also occurs along other directions.

The audit skips calls that are undefined in torch, elements that `index_put` writes twice, and `lstsq` of several
matrices by gelsy, whose value is wrong if a matrix needs other pivots than the previous matrix. Random samples of a
distribution are constants by torch's definition. `--seed` selects other calls, and `--cases` sets their number. Failing
calls are reduced and printed as a script.
"""


def markdown_page(table: AuditTable, versions: Sequence[AuditTable] = (), invented: MutatedAudit | None = None) -> str:
    """Return a page with counts, operators not right by every route, invented calls and versions of torch."""
    parts = [f"# Derivatives of torch {table.torch}, audited", _HOW]
    parts += [f"Date of the data: {table.date}."] if table.date else []
    parts += ["## Counts", *_counts(table)]
    parts += ["## Not right everywhere", *_defects(table), "## What the errors say", *_messages(table)]
    parts += ["## Calls that the database leaves out", *_of_invented(invented)] if invented else []
    parts += ["## By version of torch", *_by_version(versions)] if versions else []
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _counts(table: AuditTable) -> Iterator[str]:
    for run in table.runs:
        counts = table.counts(run)
        seen = [status for status in reversed(STATUSES) if any(counts[route][status] for route in AUDITED_ROUTES)]
        rows = [(route, *(str(counts[route][status]) for status in seen)) for route in AUDITED_ROUTES]
        yield f"{len(table.operators)} operators, {TITLES[run]}:"
        yield grid(("route", *seen), rows)


def _defects(table: AuditTable) -> Iterator[str]:
    bad = sorted({name for run in table.runs for name in table.defects(run)})
    if not bad:
        yield "Nothing."
        return
    if len(table.runs) > 1:
        yield "Cells show torch alone → inside `hodiff.corrected()`, or one word if both are equal."
    yield grid(("operator", *AUDITED_ROUTES), [(f"`{name}`", *_cells(table, name)) for name in bad])


def _cells(table: AuditTable, name: str) -> Iterator[str]:
    entry = table.operators[name]
    for route in AUDITED_ROUTES:
        words = [_word(entry[run][route]) for run in table.runs if run in entry]
        yield " → ".join(word for word, _ in groupby(words))


def _word(verdict: Verdict) -> str:
    if verdict.status != "wrong" or verdict.error is None:
        return verdict.status
    return "wrong (true value ≈ 0)" if verdict.vanishes else f"wrong {verdict.error:.0e}"


def _messages(table: AuditTable) -> Iterator[str]:
    run = table.runs[-1] if table.runs else "torch"
    rows = []
    for name, verdicts in sorted(table.defects(run).items()):
        by_message: dict[str, list[str]] = {}
        for route, verdict in verdicts.items():
            if verdict.detail:
                by_message.setdefault(f"{verdict.status}: {verdict.detail[:_MESSAGE]}", []).append(route)
        rows += [(f"`{name}`", _listed(routes), message.replace("|", "\\|")) for message, routes in by_message.items()]
    yield f"Of the run {TITLES[run]}." if rows else "Nothing."
    if rows:
        yield grid(("operator", "routes", "detail"), rows)


def _of_invented(invented: MutatedAudit) -> Iterator[str]:
    """Yield counts by run, and a row for each operator with a silently wrong call."""
    yield _INVENTED
    totals = [(TITLES[run], invented.total(run)) for run in invented.counts]
    rows = [
        (title, *map(str, (each.judged, each.silent, each.raising)), each.lost or "none given up")
        for title, each in totals
    ]
    yield f"torch {invented.torch}, seed {invented.seed}:"
    yield grid(("run", "calls", "silently wrong or not finite", "raises", "operators"), rows)
    names = sorted({name for row in invented.counts.values() for name, each in row.items() if each.silent})
    if names:
        yield "Silently wrong calls of each operator:"
        yield grid(
            ("operator", *(TITLES[run] for run in invented.counts)),
            [(f"`{name}`", *(_silent_of(row[name]) for row in invented.counts.values())) for name in names],
        )


def _silent_of(count: Count) -> str:
    return count.lost or f"{count.silent} of {count.judged}"


def _by_version(versions: Sequence[AuditTable]) -> Iterator[str]:
    """Yield a row for each operator that torch alone gets wrong or lacks in a version, a column for each version."""
    found = [table.defects(TORCH) for table in versions]
    names = sorted({name for defects in found for name in defects})
    yield _VERSIONS
    rows = [
        (f"`{name}`", *(_defect_of(table, defects, name) for table, defects in zip(versions, found, strict=True)))
        for name in names
    ]
    titles = (f"torch {table.torch}" + f" ({table.date})" * bool(table.date) for table in versions)
    yield grid(("operator", *titles), rows)


def _defect_of(table: AuditTable, defects: Mapping[str, Verdicts], name: str) -> str:
    if name not in table.operators:
        return "not there"
    by_status: dict[str, list[str]] = {}
    for route, verdict in defects.get(name, {}).items():
        by_status.setdefault(verdict.status, []).append(route)
    return "; ".join(f"{status}: {_listed(routes, _SHORT)}" for status, routes in by_status.items()) or "right"


def _listed(routes: list[str], names: Mapping[str, str] | None = None) -> str:
    return "all" if len(routes) == len(AUDITED_ROUTES) else ", ".join((names or {}).get(each, each) for each in routes)
