"""Markdown page of the audit of Taylor mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from hodiff.audit.jets.jet_audit import JetAudit
from hodiff.audit.jets.verdict import STATUSES, JetVerdict
from hodiff.audit.page import grid

_HOW = """\
Whether `hodiff.taylor.jet` and collapsed jets are right on torch's operators. Operators and samples are those of
torch's own database (`torch.testing`), in float64: at most two of up to 1500 numbers each.
`python -m hodiff audit --jets` makes this page, `python -m hodiff audit --jets --op NAME` the rows of one operator;
`hodiff/audit/data` has the whole table as JSON.

All arguments move along random polynomial curves, in two directions at once, and coefficients 0 to {order} of the
outputs are compared with those by two other ways:

- **nesting**: forward mode in t, nested as deep as the order, direction by direction, with hodiff's corrections. It has
  to agree to 1e-9, relative to the largest number of a coefficient, or to 1 if that is larger.
- **values**: interpolation of torch's own values at 15 Chebyshev points of six intervals around t = 0, in which no
  derivative of anybody's has a part. An interval that agrees with its two neighbours to 1e-7 gives the coefficient,
  number by number; where none does, as next to a kink, values do not tell. Jets have to agree to 1e-6.

Collapsed jets of order 2 and 4 are compared with the sum of plain ones over the directions, to 1e-9. Outputs in single
precision may be off by 50 000 times more. An operator is as good as its worst sample.

- **right**: agrees with whatever there is to compare with, at every order, plain and collapsed; **off**: does not.
- **refused**: an error; **timed out**: no answer within the time limit.
- **random**: a sample of a distribution whose parameters move, to torch a constant.
- **no oracle**: nesting raises, and values do not settle at every order.
- **not differentiable**: no floating-point output, a sparse one or one in 16 bits, complex inputs only, or an operator
  for which torch declares no derivative.
"""


def jet_page(table: JetAudit) -> str:
    """Return a page with counts, distances, operators that are not right, and functions without a rule."""
    parts = [f"# Taylor mode on the operators of torch {table.torch}, audited", _HOW.format(order=table.order)]
    parts += ["## Counts", *_counts(table), "## How close", *_distances(table)]
    parts += ["## Not right", _details(table, ("off", "refused", "timed out"))]
    parts += ["## Nothing to compare with", _details(table, ("no oracle",))]
    parts += ["## Without a rule", *_without_rule(table)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _counts(table: JetAudit) -> Iterator[str]:
    rows = []
    for status in reversed(STATUSES):
        own = [each for each in table.operators.values() if each.status == status]
        nested = sum(bool(each.without_rule) for each in own)
        rows.append((status, str(len(own) - nested), str(nested), str(len(own))))
    yield f"{len(table.operators)} operators, orders 1 to {table.order}:"
    yield grid(("", "by rules", "with a part by nested forward mode", "together"), rows)


def _distances(table: JetAudit) -> Iterator[str]:
    yield "Of the operators that are right, outputs in double precision: how far jets are from the other way."
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
        "These go by nested forward mode of that one function, which is as right as torch's forward mode with hodiff's "
        "corrections, and takes 2^K:"
    )
    names = sorted(name for name, each in table.operators.items() if each.without_rule and _judged(each))
    yield ", ".join(f"`{name}`" for name in names) + "."


def _judged(verdict: JetVerdict) -> bool:
    return verdict.status not in ("not differentiable", "refused")
