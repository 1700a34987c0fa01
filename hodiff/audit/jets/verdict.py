"""Verdicts of the audit of Taylor mode on an operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Statuses from the least informative to the worst: the worst sample decides.
STATUSES = ("not differentiable", "random", "no oracle", "right", "refused", "timed out", "off")


@dataclass(frozen=True)
class JetVerdict:
    """Verdict on an operator in Taylor mode.

    Attributes:
        status: One of `STATUSES`.
        detail: The defect, or why there was no comparison.
        nested: Largest distance to nested forward mode, by order.
        values: Largest distance to interpolated values, by order.
        collapsed: Largest distance of collapsed jets to the sum of plain jets over the directions, by order.
        without_rule: Functions without a rule, which use nested forward mode.
        coarse: Whether an output is in single precision.
    """

    status: str
    detail: str = ""
    nested: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    collapsed: Mapping[str, float] = field(default_factory=dict)
    without_rule: tuple[str, ...] = ()
    coarse: bool = False

    @property
    def is_defect(self) -> bool:
        """Whether jets are off or too slow; operators that are refused raise an error, which is no defect here."""
        return self.status in ("timed out", "off")

    def to_json(self) -> dict[str, Any]:
        """Return the nonempty attributes by name; errors have two digits, as further digits depend on the machine."""
        rounded = {
            name: {order: float(f"{error:.1e}") for order, error in getattr(self, name).items()}
            for name in ("nested", "values", "collapsed")
        }
        return {key: value for key, value in (asdict(self) | rounded).items() if value}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> JetVerdict:
        """Return the verdict that `to_json` wrote."""
        return JetVerdict(**{**data, "without_rule": tuple(data.get("without_rule", ()))})


def merged(samples: Iterable[JetVerdict]) -> JetVerdict:
    """Return the worst of several verdicts, with the largest errors of all."""
    listed = list(samples)
    worst = max(listed, key=lambda each: STATUSES.index(each.status))
    names = {name: None for each in listed for name in each.without_rule}
    return JetVerdict(
        worst.status,
        worst.detail,
        _largest(each.nested for each in listed),
        _largest(each.values for each in listed),
        _largest(each.collapsed for each in listed),
        tuple(names),
        any(each.coarse for each in listed),
    )


def _largest(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for order, error in row.items():
            found[order] = max(found.get(order, 0.0), error)
    return dict(sorted(found.items()))
