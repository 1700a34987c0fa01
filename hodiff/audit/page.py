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
Where the second derivatives of torch's operators are right by each route, and the third ones in reverse mode. Operators
and samples are those of torch's own database (`torch.testing`), in float64. `python -m hodiff audit` makes this page,
`python -m hodiff audit --op NAME` the rows of one operator; `hodiff/checks/data` has the whole table as JSON.

The outputs of up to six samples of each operator are contracted to a scalar in such a way that the incoming gradient
depends on the input, and the inputs move along random directions. Each derivative is compared with extrapolated
differences of the order below, and the gradient with differences of the value, so that no derivative vouches for
itself. Matrices that have to be symmetric, triangular or positive definite are made so inside the function. Errors
are relative to the largest element of the derivative or, where that vanishes, to the rounding of the lower orders; then
they come out large. An operator is as good as its worst sample.

- **right**: agrees with the differences; **wrong**: does not, without a word; **non-finite**: NaN or infinite where the
  derivative is finite; **raises**: an error; **timed out**: no answer within the time limit.
- **not smooth**: one-sided differences disagree at every sample, so that there is nothing to compare with.
- **random**: two evaluations differ. If such an operator is wrong or raises with the seed held, it is listed so.
- **not differentiable**: no floating-point output, an output in 16 bits, sparse tensors, complex inputs only, or an
  operator for which torch declares no derivative.
"""

# Abbreviations of the routes in tables.
_SHORT = dict(zip(AUDITED_ROUTES, ("rr", "fr", "rf", "ff", "third"), strict=True))

_VERSIONS = """\
What torch alone has wrong or lacks, in the versions that were audited: rr is reverse-over-reverse, fr
forward-over-reverse, rf reverse-over-forward, ff forward-over-forward, and third the third order in reverse mode.
`hodiff.preflight` looks up the version that is installed, or else the nearest older one.
"""

_INVENTED = """\
The database leaves out much: `python -m hodiff audit --mutate` changes its samples, each in one way. One argument gets
a batch, a dimension of size 1 or 0, zeros, ties, equal slices, large, small or subnormal numbers, close eigenvalues,
another layout in memory, repeated indices; or the call another option, keywords, float32. The value is compared with
torch's, and derivatives of order 1 to 3 by every route with differences. A call counts where differences of two largest
steps agree and where they add up as directions do, and an error where it shows along other directions, too. Left out is
what torch calls undefined, a place that `index_put` writes twice, and `lstsq` of several matrices by gelsy, whose value
is wrong where a matrix needs other pivots than the one before; what is drawn from a distribution is a constant by
torch's definition. `--seed` makes other calls and `--cases` more of them; what fails is made smaller and printed as a
script.
"""


def markdown_page(table: AuditTable, versions: Sequence[AuditTable] = (), invented: MutatedAudit | None = None) -> str:
    """Return a page with counts, operators not right by every route, invented calls and versions of torch."""
    parts = [f"# Derivatives of torch {table.torch}, audited", _HOW, "## Counts", *_counts(table)]
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
        yield "Torch alone → inside `hodiff.corrected()`; one word where nothing changed."
    yield grid(("operator", *AUDITED_ROUTES), [(f"`{name}`", *_cells(table, name)) for name in bad])


def _cells(table: AuditTable, name: str) -> Iterator[str]:
    entry = table.operators[name]
    for route in AUDITED_ROUTES:
        words = [_word(entry[run][route]) for run in table.runs if run in entry]
        yield " → ".join(word for word, _ in groupby(words))


def _word(verdict: Verdict) -> str:
    return f"wrong {verdict.error:.0e}" if verdict.status == "wrong" and verdict.error is not None else verdict.status


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
        yield "Silently wrong, of the calls of an operator:"
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
    yield grid(("operator", *(f"torch {table.torch}" for table in versions)), rows)


def _defect_of(table: AuditTable, defects: Mapping[str, Verdicts], name: str) -> str:
    if name not in table.operators:
        return "not there"
    by_status: dict[str, list[str]] = {}
    for route, verdict in defects.get(name, {}).items():
        by_status.setdefault(verdict.status, []).append(route)
    return "; ".join(f"{status}: {_listed(routes, _SHORT)}" for status, routes in by_status.items()) or "right"


def _listed(routes: list[str], names: Mapping[str, str] | None = None) -> str:
    return "all" if len(routes) == len(AUDITED_ROUTES) else ", ".join((names or {}).get(each, each) for each in routes)
