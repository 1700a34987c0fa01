"""What the audit says of one operator by one route, and what many samples of it amount to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hodiff.routes import ROUTES

THIRD = "third-order reverse"
AUDITED_ROUTES = (*ROUTES, THIRD)

# From the least telling to the worst. One wrong sample makes an operator wrong, and one right sample shows that an
# operator whose other samples lie on a kink is right where it is smooth.
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
    """What one route makes of an operator.

    Attributes:
        status: One of `STATUSES`.
        error: Largest absolute difference over the scale of the derivative, where there was a comparison.
        detail: First line of the exception, or what else there is to say.
    """

    status: str
    error: float | None = None
    detail: str = ""

    @property
    def is_defect(self) -> bool:
        """Whether a derivative that exists is wrong or missing."""
        return self.status in DEFECTS

    def is_worse_than(self, other: Verdict) -> bool:
        """Whether this status is a defect, and a worse one than the other's."""
        return self.is_defect and STATUSES.index(self.status) > STATUSES.index(other.status)

    def to_json(self) -> dict[str, Any]:
        """The attributes by name; errors to three digits, as more of them differ from machine to machine."""
        return asdict(self) | {"error": None if self.error is None else float(f"{self.error:.2e}")}


Verdicts = dict[str, Verdict]


def everywhere(verdict: Verdict) -> Verdicts:
    """The same verdict by every route."""
    return dict.fromkeys(AUDITED_ROUTES, verdict)


def worst(samples: Iterable[Verdicts]) -> Verdicts:
    """By route, the worst verdict of all samples, with the number of samples that share its status."""
    listed = list(samples)
    return {route: _worst([sample[route] for sample in listed]) for route in AUDITED_ROUTES}


def _worst(everything: list[Verdict]) -> Verdict:
    verdicts = [verdict for verdict in everything if verdict.status != STATUSES[0]] or everything
    found = max(verdicts, key=lambda verdict: (STATUSES.index(verdict.status), verdict.error or 0.0))
    count = sum(verdict.status == found.status for verdict in verdicts)
    counted = f"{count} of {len(verdicts)} samples" if count < len(verdicts) else ""
    return Verdict(found.status, found.error, "; ".join(filter(None, (found.detail, counted))))
