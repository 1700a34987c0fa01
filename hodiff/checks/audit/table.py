"""The audit's result: by operator, run and route; as JSON, and compared with an older one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hodiff.checks.audit.verdicts import AUDITED_ROUTES, Verdict, Verdicts
from hodiff.errors import InputError

TORCH, CORRECTED = RUNS = ("torch", "corrected")
TITLES = {TORCH: "torch alone", CORRECTED: "inside hodiff.corrected()"}


@dataclass(frozen=True)
class AuditTable:
    """What `audit` measured.

    Attributes:
        torch: The version of torch.
        operators: By name in torch's database and by run, "torch" alone or "corrected", the verdict of each route.

    Example:
        >>> from hodiff.checks.audit.verdicts import Verdict, everywhere
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

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that were made: "torch", "corrected" or both."""
        return tuple(run for run in RUNS if any(run in entry for entry in self.operators.values()))

    def counts(self, run: str) -> dict[str, Counter[str]]:
        """By route, how many operators have which status."""
        entries = [entry[run] for entry in self.operators.values() if run in entry]
        return {route: Counter(entry[route].status for entry in entries) for route in AUDITED_ROUTES}

    def defects(self, run: str) -> dict[str, Verdicts]:
        """By operator, the routes that are wrong, raise, are not finite or did not end."""
        found = {
            name: {route: verdict for route, verdict in entry.get(run, {}).items() if verdict.is_defect}
            for name, entry in self.operators.items()
        }
        return {name: routes for name, routes in found.items() if routes}

    def worsened(self, before: AuditTable) -> list[str]:
        """What became worse since an older table, a line each; operators that either table lacks are passed over."""
        lines = []
        for name, entry in self.operators.items():
            for run, verdicts in entry.items():
                for route, old in before.operators.get(name, {}).get(run, {}).items():
                    new = verdicts[route]
                    if new.is_worse_than(old):
                        lines.append(f"{name}, {run}, {route}: was {old.status}, is {new.status} {new.detail}".rstrip())
        return lines

    def to_json(self) -> str:
        """The table as JSON, an operator a line, so that versions of it compare well."""
        lines = [
            f"{json.dumps(name)}: "
            + json.dumps({run: {r: v.to_json() for r, v in verdicts.items()} for run, verdicts in entry.items()})
            for name, entry in sorted(self.operators.items())
        ]
        return f'{{"torch": {json.dumps(self.torch)}, "operators": {{\n' + ",\n".join(lines) + "\n}}\n"

    @classmethod
    def from_json(cls, text: str) -> AuditTable:
        """Read what `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            The table.

        Raises:
            InputError: If it is something else.
        """
        try:
            data = json.loads(text)
            operators = {
                name: {run: {r: Verdict(**v) for r, v in verdicts.items()} for run, verdicts in entry.items()}
                for name, entry in data["operators"].items()
            }
            return cls(data["torch"], operators)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"AuditTable.from_json: text: expected an audit's JSON, got {error}.") from error

    def __str__(self) -> str:
        """Of each run, how many operators have a defect, and which."""
        lines = [f"operators of torch {self.torch} audited: {len(self.operators)}"]
        for run in self.runs:
            bad = sorted(self.defects(run))
            lines.append(f"{TITLES[run]}: {len(bad)} with a defect{': ' * bool(bad)}{', '.join(bad)}")
        return "\n".join(lines)
