"""Verdicts of the audit on an operator by a route, and their summary over samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hodiff.routes import ROUTES

THIRD = "third-order reverse"
AUDITED_ROUTES = (*ROUTES, THIRD)

# Statuses from the least informative to the worst. One wrong sample makes an operator wrong. One right sample shows
# that an operator whose other samples lie on a kink is right where it is smooth.
STATUSES = (
    "not differentiable",
    "not smooth",
    "right",
    "random",
    "timed out",
    "non-finite",
    "raises",
    "wrong",
)
DEFECTS = frozenset(STATUSES[STATUSES.index("timed out") :])


@dataclass(frozen=True)
class Verdict:
    """Verdict on an operator by one route.

    Attributes:
        status: One of `STATUSES`.
        error: Largest absolute difference over the scale of the derivative; None without a comparison.
        detail: First line of the exception, or another remark.
    """

    status: str
    error: float | None = None
    detail: str = ""

    @property
    def is_defect(self) -> bool:
        """Whether an existing derivative is wrong or missing."""
        return self.status in DEFECTS

    def is_worse_than(self, other: Verdict) -> bool:
        """Whether this status is a defect, and worse than the other status."""
        return self.is_defect and STATUSES.index(self.status) > STATUSES.index(other.status)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name; errors have three digits, as further digits depend on the machine."""
        return asdict(self) | {"error": None if self.error is None else float(f"{self.error:.2e}")}


Verdicts = dict[str, Verdict]


def everywhere(verdict: Verdict) -> Verdicts:
    """Return the same verdict for every route."""
    return dict.fromkeys(AUDITED_ROUTES, verdict)


def worst(samples: Iterable[Verdicts]) -> Verdicts:
    """Return the worst verdict of all samples by route, with the number of samples that share its status."""
    listed = list(samples)
    return {route: _worst([sample[route] for sample in listed]) for route in AUDITED_ROUTES}


def _worst(everything: list[Verdict]) -> Verdict:
    verdicts = [verdict for verdict in everything if verdict.status != STATUSES[0]] or everything
    found = max(verdicts, key=lambda verdict: (STATUSES.index(verdict.status), verdict.error or 0.0))
    count = sum(verdict.status == found.status for verdict in verdicts)
    counted = f"{count} of {len(verdicts)} samples" if count < len(verdicts) else ""
    return Verdict(found.status, found.error, "; ".join(filter(None, (found.detail, counted))))
