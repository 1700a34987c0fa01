"""Write the page of torch's faults from the table of corrections, the audits, the reports and the measured versions.

python tests/upstream/write_page.py
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENTS = HERE.parents[1] / "docs"
PAGE = DOCUMENTS / "reference" / "upstream.md"
SUMMARY = DOCUMENTS / "explanations" / "cost_of_wrong_derivatives.md"
BEGIN, END = "<!-- table: python tests/upstream/write_page.py -->", "<!-- end of table -->"
# Version of torch for which the page names the operators of scripts.
_SCRIPTS = "2.13"
# Number of functions that a row names.
_NAMED = 4

_HEAD = """\
# Faults of torch

The tables list every fault of torch's derivatives that hodiff corrects, with the reports on GitHub, and the versions
of torch in which it was measured. [Corrections](../guides/corrections.md) has one row for each function, and [the
audit](audit.md) the errors. The audits are of {dates}.

- **routes**: rr, fr, rf and ff are reverse-over-reverse, forward-over-reverse, reverse-over-forward and
  forward-over-forward. Without routes, only third derivatives, tails or special arguments are concerned.
- **reports**: issues or pull requests of `pytorch/pytorch` that describe the fault; many are collected in
  [#{collection}](https://github.com/pytorch/pytorch/issues/{collection}). Some describe only a part of it, or another
  cause of the same error. "none in our list" does not mean that nobody reported it: the list is not complete.
- **{versions}**: the routes that are wrong with torch alone in that version, in the audit of torch's database or at
  one or two further calls; third is the third order in reverse mode. Only calls that hodiff computes right are counted.
  "an example" means that only the example of a report, or one with a special argument, is wrong. "right" means that
  none of these is wrong in this version, but in another. "–": not measured by these calls; see the [tests of the
  rule](../../tests/corrections/rules), which have special arguments for torch 2.13.
- **script**: the operator for which `python -m hodiff audit --op NAME --script` prints a script of torch {latest} alone
  that shows a fault. Other rows have none: samples of torch's database do not show these faults.
- **fixed in**: the version from which hodiff leaves the function to torch. Where it is empty although the newest
  version is right, hodiff still corrects other calls of the function.

`python tests/upstream/write_page.py` writes this page; `python tests/upstream/measure.py` measures a version.
"""

_ALONE = """\
## Operators of the audit without a rule of their own

Torch's operator database also has these operators that are not right in some version. Rules for the functions that
they call correct some of them; the last column is the audit inside `hodiff.corrected()` with torch {version}.
"""


@cache
def measured() -> Mapping[str, Any]:
    """The measured versions, oldest first."""
    files = sorted(HERE.glob("torch-*.json"), key=lambda file: [int(n) for n in file.stem[6:].split(".")])
    return {".".join(file.stem[6:].split(".")[:2]): json.loads(file.read_text(encoding="utf-8")) for file in files}


def short(statuses: Mapping[str, set[str]], order: tuple[str, ...]) -> str:
    """Routes that are wrong or not finite, then those that raise."""
    from hodiff.checks.torch_verdicts import AUDITED_ROUTES

    names = dict(zip(AUDITED_ROUTES, ("rr", "fr", "rf", "ff", "third"), strict=True))

    def listed(kinds: set[str]) -> str:
        routes = [route for route in order if statuses.get(route, set()) & kinds]
        return "all" if len(routes) == len(order) else " ".join(names[route] for route in routes)

    wrong, raising = listed({"wrong", "non-finite"}), listed({"raises", "timed out"})
    return "; ".join(filter(None, (wrong, f"raises {raising}" if raising else "")))


def statuses_in(version: str, functions: tuple[str, ...]) -> str:
    """Cell of one version: the defects of the functions' calls, of the audit, and of the reports."""
    from upstream.faults import audited_operators
    from upstream.reports import THREADS

    from hodiff.checks.torch_verdicts import AUDITED_ROUTES, audit_on_file

    data = measured()[version]
    found: dict[str, set[str]] = {}
    own = [defects for call, defects in data["calls"].items() if call in functions]
    operators = audit_on_file(version).operators
    own += [
        {route: each.status for route, each in operators[name]["torch"].items() if each.is_defect}
        for name in audited_operators(functions)
        if name in operators
    ]
    for defects in own:
        for route, status in defects.items():
            found.setdefault(route, set()).add(status)
    numbers = {f"#{each.number}" for each in THREADS if set(each.functions) & set(functions)}
    reported = [wrong for name, wrong in data["reports"].items() if name.split()[0] in numbers | set(functions)]
    text = short(found, AUDITED_ROUTES)
    if not text and any(each is True for each in reported):
        return "an example"
    return text or ("right" if own or reported else "")


def lines_of(kind: str) -> Iterator[str]:
    """Rows of the table of one kind."""
    from upstream.faults import audited_operators, faults
    from upstream.reports import THREADS

    import hodiff
    from hodiff.checks.torch_verdicts import audit_on_file

    routes = dict(zip(hodiff.ROUTES, ("rr", "fr", "rf", "ff"), strict=True))
    shown = audit_on_file(_SCRIPTS).defects("torch")
    for row, functions in faults():
        if row.kind != kind:
            continue
        named = ", ".join(f"`{each}`" for each in functions[:_NAMED])
        more = f" and {len(functions) - _NAMED} more" if len(functions) > _NAMED else ""
        links = " ".join(each.link for each in THREADS if set(each.functions) & set(functions)) or "none in our list"
        seen = [statuses_in(version, functions) for version in measured()]
        if not any(each and each != "right" for each in seen):
            seen = ["–"] * len(seen)
        script = next((f"`{name}`" for name in audited_operators(functions) if name in shown), "")
        cells = (
            named + more,
            row.reason,
            " ".join(routes[each] for each in row.routes),
            links,
            *seen,
            script,
            row.mended,
        )
        yield "| " + " | ".join(cell.replace("|", r"\vert ") for cell in (*cells, row.reference)) + " |"


def lines_alone() -> Iterator[str]:
    """Rows of operators of the audits that no row of the corrections names."""
    from upstream.faults import faults, row_names

    from hodiff.checks.torch_verdicts import AUDITED_ROUTES, audit_on_file

    ruled = {name for _, functions in faults() for name in functions}
    tables = {version: audit_on_file(version) for version in measured()}
    names = sorted({name for table in tables.values() for name in table.defects("torch")})
    for name in names:
        if set(row_names(name)) & ruled:
            continue
        cells = []
        for table in tables.values():
            defects = table.defects("torch").get(name, {})
            text = short({route: {each.status} for route, each in defects.items()}, AUDITED_ROUTES)
            cells.append(text or ("right" if name in table.operators else "not there"))
        last = list(tables.values())[-1]
        left = last.defects("corrected").get(name, {})
        corrected = short({route: {each.status} for route, each in left.items()}, AUDITED_ROUTES) or "right"
        yield f"| `{name}` | {' | '.join(cells)} | {corrected} |"


def page() -> str:
    """The page."""
    from upstream.reports import COLLECTION

    from hodiff.checks.torch_verdicts import audit_on_file

    versions = list(measured())
    titles = ("functions", "what is wrong", "routes", "reports", *versions, "script", "fixed in", "rule of hodiff")
    head = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"
    dates = ", ".join(f"{audit_on_file(version).date} (torch {version})" for version in versions)
    parts = [_HEAD.format(collection=COLLECTION, versions=", ".join(versions), dates=dates, latest=_SCRIPTS)]
    for kind, title in (("wrong", "## Silently wrong"), ("missing", "## Missing, or raising an error")):
        parts += [title + "\n", "\n".join((head, *lines_of(kind))) + "\n"]
    titles = ("operator", *versions, "corrected")
    alone = "\n".join((f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", *lines_alone())) + "\n"
    return "\n".join((*parts, _ALONE.format(version=versions[-1]), alone))


def _silent(tables: list[Any]) -> Iterator[str]:
    """Rows of operators with silent errors of second derivatives, by version."""
    from hodiff.checks.torch_verdicts import TORCH
    from hodiff.routes import ROUTES

    found = [
        {
            name: {
                route: {each.status} for route, each in entry[TORCH].items() if each.status in {"wrong", "non-finite"}
            }
            for name, entry in table.operators.items()
        }
        for table in tables
    ]
    names = sorted({name for rows in found for name, routes in rows.items() if routes.keys() & set(ROUTES)})
    yield f"| operator | {' | '.join(table.torch for table in tables)} |"
    yield f"|{'---|' * (1 + len(tables))}"
    for name in names:
        cells = [
            "not there"
            if name not in rows
            else short(rows[name], ROUTES) or ("none" if _declares_none(table, name) else "no")
            for table, rows in zip(tables, found, strict=True)
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _declares_none(table: Any, name: str) -> bool:
    from hodiff.checks.torch_verdicts import TORCH

    return all(each.status == "not differentiable" for each in table.operators[name][TORCH].values())


def summary() -> str:
    """The page on costs, with the counts of the audits."""
    from hodiff.checks.torch_verdicts import AUDITED_ROUTES, TORCH, audit_on_file, versions_on_file

    tables = [audit_on_file(version) for version in versions_on_file()]
    kinds = {"wrong": ("wrong", "non-finite"), "raises": ("raises", "timed out")}
    titles = ("route", *(f"{table.torch}, {kind}" for table in tables for kind in kinds))
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for route in AUDITED_ROUTES:
        counts = [table.counts(TORCH)[route] for table in tables]
        cells = [str(sum(count[status] for status in kinds[kind])) for count in counts for kind in kinds]
        lines.append(f"| {route} | {' | '.join(cells)} |")
    dates = ", ".join(f"{table.date} (torch {table.torch})" for table in tables)
    any_route = [len(table.defects(TORCH)) for table in tables]
    sizes = " and ".join(f"{len(table.operators)} operators of {table.torch}" for table in tables)
    said = f"Of {sizes}, {', '.join(map(str, any_route[:-1]))} and {any_route[-1]} have a defect by some route. "
    said += f"The audits are of {dates}."
    said_too = (
        "The second derivatives of these operators are silently wrong, or not finite, by the routes in the cells: rr "
        'is reverse-over-reverse, rf reverse-over-forward, and so on; the first letter is the outer pass. "none" means '
        "that torch declared no derivative in that version; those of the Bessel functions were silently zero."
    )
    silent = [textwrap.fill(said_too, 120), "", *_silent(tables)]
    text = SUMMARY.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    return (
        f"{text[:start]}\n\n"
        + "\n".join(lines)
        + f"\n\n{textwrap.fill(said, 120)}\n\n"
        + "\n".join(silent)
        + f"\n\n{text[stop:]}"
    )


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    PAGE.write_text(page(), encoding="utf-8")
    SUMMARY.write_text(summary(), encoding="utf-8")
