"""Verdicts of the audit on operators, their summary over samples, and the stored tables of all operators."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from hodiff.errors import InputError
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
# Error above which the true derivative all but vanishes.
VANISHING = 1e4
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

    @property
    def vanishes(self) -> bool:
        """Whether the true derivative all but vanishes, so that `error` is no relative error."""
        return (self.error or 0.0) > VANISHING

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


_STORED = resources.files("hodiff.checks") / "data"

TORCH, CORRECTED = RUNS = ("torch", "corrected")
TITLES = {TORCH: "torch alone", CORRECTED: "inside hodiff.corrected()"}


@dataclass(frozen=True)
class AuditTable:
    """Result of `audit`.

    Attributes:
        torch: The version of torch.
        operators: Verdicts by name in torch's database, by run ("torch" alone or "corrected") and by route.
        date: The day on which entries were last computed, as "2026-11-30"; may be empty.

    Example:
        >>> from hodiff.checks.torch_verdicts import Verdict, everywhere
        >>> table = AuditTable("2.13.0", {"sin": {"torch": everywhere(Verdict("right", 1e-12))}})
        >>> table.defects("torch")
        {}
        >>> AuditTable.from_json(table.to_json()) == table
        True
        >>> print(table)
        operators of torch 2.13.0 audited: 1
        torch alone: 0 with a defect
    """

    torch: str
    operators: Mapping[str, Mapping[str, Verdicts]]
    date: str = ""

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs in the table: "torch", "corrected" or both."""
        return tuple(run for run in RUNS if any(run in entry for entry in self.operators.values()))

    def counts(self, run: str) -> dict[str, Counter[str]]:
        """Return the number of operators with each status, by route."""
        entries = [entry[run] for entry in self.operators.values() if run in entry]
        return {route: Counter(entry[route].status for entry in entries) for route in AUDITED_ROUTES}

    def defects(self, run: str) -> dict[str, Verdicts]:
        """Return the routes that are wrong, raise, are not finite or time out, by operator."""
        found = {
            name: {route: verdict for route, verdict in entry.get(run, {}).items() if verdict.is_defect}
            for name, entry in self.operators.items()
        }
        return {name: routes for name, routes in found.items() if routes}

    def worsened(self, before: AuditTable) -> list[str]:
        """Return a line for each verdict worse than in an older table; operators missing in either are skipped."""
        lines = []
        for name, entry in self.operators.items():
            for run, verdicts in entry.items():
                for route, old in before.operators.get(name, {}).get(run, {}).items():
                    new = verdicts[route]
                    if new.is_worse_than(old):
                        lines.append(f"{name}, {run}, {route}: was {old.status}, is {new.status} {new.detail}".rstrip())
        return lines

    def to_json(self) -> str:
        """Return the table as JSON with one operator per line, which makes diffs readable."""
        lines = [
            f"{json.dumps(name)}: "
            + json.dumps({run: {r: v.to_json() for r, v in verdicts.items()} for run, verdicts in entry.items()})
            for name, entry in sorted(self.operators.items())
        ]
        head = f'{{"torch": {json.dumps(self.torch)}, "date": {json.dumps(self.date)}, "operators": {{\n'
        return head + ",\n".join(lines) + "\n}}\n"

    @classmethod
    def from_json(cls, text: str) -> AuditTable:
        """Read a table that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            The table.

        Raises:
            InputError: If the text is no such JSON.
        """
        try:
            data = json.loads(text)
            operators = {
                name: {run: {r: Verdict(**v) for r, v in verdicts.items()} for run, verdicts in entry.items()}
                for name, entry in data["operators"].items()
            }
            return cls(data["torch"], operators, data.get("date", ""))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"AuditTable.from_json: text: expected an audit's JSON, got {error}.") from error

    def __str__(self) -> str:
        """Return the number and names of operators with a defect, for each run."""
        lines = [f"operators of torch {self.torch} audited: {len(self.operators)}"]
        for run in self.runs:
            bad = sorted(self.defects(run))
            lines.append(f"{TITLES[run]}: {len(bad)} with a defect{': ' * bool(bad)}{', '.join(bad)}")
        return "\n".join(lines)


def versions_on_file() -> list[str]:
    """Return the minor versions of torch with a stored audit, such as "2.13", oldest first."""
    names = [file.name for file in _STORED.iterdir() if file.name.startswith("torch-")]
    return sorted((name.removeprefix("torch-").removesuffix(".json") for name in names), key=_numbers)


def audit_on_file(version: str = torch.__version__) -> AuditTable:
    """Return the stored audit of torch's minor version, else of the nearest older version, else of the oldest."""
    audited = versions_on_file()
    older = [each for each in audited if _numbers(each) <= _numbers(version)]
    return _read(older[-1] if older else audited[0])


@cache
def _read(version: str) -> AuditTable:
    return AuditTable.from_json((_STORED / f"torch-{version}.json").read_text(encoding="utf-8"))


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
