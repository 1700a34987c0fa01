"""Markdown page of the audit of Taylor mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from hodiff.audit.jets.jet_audit import JetAudit
from hodiff.audit.jets.verdict import STATUSES
from hodiff.audit.page import grid

_HOW = """\
The audit tests `hodiff.taylor.jet` and collapsed jets on torch's operators. Operators and samples are from torch's own
database (`torch.testing`), in float64: at most two samples of up to 1500 numbers each. `python -m hodiff audit --jets`
writes this page, and `python -m hodiff audit --jets --op NAME` prints the rows of one operator. `hodiff/audit/data` has
the whole table as JSON.

All arguments are random polynomials in t, in two directions at once. The audit compares coefficients 0 to {order} of
the outputs with two references:

- **nesting**: nested forward mode in t, for each direction, with hodiff's corrections. The tolerance is 1e-9, relative
  to the largest element of a coefficient, or to 1 if that is larger.
- **values**: interpolation of torch's own values at 15 Chebyshev points of six intervals around t = 0, without any
  derivative. For each element, an interval that agrees with its two neighbours to 1e-7 defines the coefficient. If no
  interval does, such as next to a kink, there is no reference of this kind. The tolerance is 1e-6.

Collapsed jets of order 2 and 4 are compared with sums of plain jets over the directions, with tolerance 1e-9. For
outputs in single precision, tolerances are 50 000 times larger. The verdict of an operator is that of its worst sample.

- **right**: agrees with all available references, at every order, plain and collapsed; **off**: disagrees.
- **refused**: raises an error; **timed out**: no result within the time limit.
- **random**: a sample of a distribution whose parameters depend on t, which torch treats as a constant.
- **no oracle**: nesting raises an error, and values have no reference at some order.
- **not differentiable**: no floating-point output, a sparse output or one in 16 bits, only complex inputs, or an
  operator for which torch declares no derivative.
"""


def jet_page(table: JetAudit) -> str:
    """Return a page with counts, distances, operators that are not right, and functions without a rule."""
    parts = [f"# Taylor mode on the operators of torch {table.torch}, audited", _HOW.format(order=table.order)]
    parts += ["## Counts", *_counts(table), "## Distances", *_distances(table)]
    parts += ["## Not right", _details(table, ("off", "refused", "timed out"))]
    parts += ["## No reference", _details(table, ("no oracle",))]
    parts += ["## Without a rule", *_without_rule(table)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _counts(table: JetAudit) -> Iterator[str]:
    rows = []
    for status in reversed(STATUSES):
        own = [each for each in table.operators.values() if each.status == status]
        nested = sum(bool(each.without_rule) for each in own)
        rows.append((status, str(len(own) - nested), str(nested), str(len(own))))
    yield f"{len(table.operators)} operators, orders 1 to {table.order}:"
    yield grid(("", "by rules", "with nested forward mode", "total"), rows)


def _distances(table: JetAudit) -> Iterator[str]:
    yield (
        "The table lists the distances between jets and the references, for right operators with outputs in double "
        "precision."
    )
    right = [each for each in table.operators.values() if each.status == "right"]
    rows = []
    for name, title in (("nested", "nesting"), ("values", "values"), ("collapsed", "collapsed to the sum")):
        for order in sorted({order for each in right for order in getattr(each, name)}):
            if order == "0":
                continue
            errors = [getattr(each, name)[order] for each in right if order in getattr(each, name) and not each.coarse]
            rows.append((title, order, str(len(errors)), f"{median(errors):.0e}", f"{max(errors):.0e}"))
    yield grid(("to", "order", "operators", "median", "largest"), rows)


def _details(table: JetAudit, statuses: Iterable[str]) -> str:
    rows = [
        (f"`{name}`", each.status, each.detail.replace("|", "\\|"))
        for name, each in sorted(table.operators.items())
        if each.status in statuses
    ]
    return grid(("operator", "", "detail"), rows) if rows else "Nothing."


def _without_rule(table: JetAudit) -> Iterator[str]:
    yield (
        "Taylor mode computes these functions by nested forward mode, with hodiff's corrections, at a cost of 2^K for "
        "order K:"
    )
    unjudged = ("not differentiable", "refused")
    found = table.operators.items()
    names = sorted(name for name, each in found if each.without_rule and each.status not in unjudged)
    yield ", ".join(f"`{name}`" for name in names) + "."
