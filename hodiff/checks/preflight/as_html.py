"""HTML of `preflight`'s report, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hodiff.checks.preflight.function_defects import FunctionDefect
from hodiff.checks.preflight.listeners import OperatorUse
from hodiff.checks.preflight.operator_routes import BAD, GOOD
from hodiff.displays import Cell, badge, element, page, table
from hodiff.routes import ROUTES


def preflight_html(
    operators: Sequence[OperatorUse],
    functions: Sequence[FunctionDefect],
    remarks: Sequence[str],
    routes: Mapping[str, str],
    verdict: str,
) -> str:
    """Return the verdict, the operators that are not right by every route, their remedies, and the remarks."""
    tint = "error" if BAD.intersection(routes.values()) else "ok" if set(routes.values()) <= GOOD else "warning"
    listed = [each for each in operators if each.worst != "right"]
    rows = [(each.name, f"{each.calls:,}", *(_cell(each.routes[route]) for route in ROUTES)) for each in listed]
    fine = sum(each.calls for each in operators) - sum(each.calls for each in listed)
    rows.append(("all others", f"{fine:,}", *[_cell("right")] * len(ROUTES)))
    rows.append((element("b", "all together"), "", *(_cell(routes[route]) for route in ROUTES)))
    said = [f"{each.name}: {each.remedy}" for each in listed if each.remedy]
    said += [f"{each.name}: {each.defect}; {each.remedy}" for each in functions]
    return page(
        element("p", badge(verdict, tint)),
        table(("operator", "calls", *ROUTES), rows),
        *(element("p", each) for each in [*said, *remarks]),
    )


def _cell(word: str) -> Cell:
    return Cell(word, "ok" if word in GOOD else "error" if word in BAD else "warning")
