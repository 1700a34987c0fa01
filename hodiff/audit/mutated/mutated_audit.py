"""`mutated_audit`: measures derivatives of torch's operators at calls that its database omits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources

import torch

from hodiff.audit.database_audit import runs_of
from hodiff.audit.mutated.mutated_operator import Finding
from hodiff.audit.pool import DiedError, Reply, Request, TimedOutError, serve_operators
from hodiff.checks.torch_verdicts import CORRECTED, RUNS, TITLES
from hodiff.common.options import require_int, require_number
from hodiff.errors import InputError


@dataclass(frozen=True)
class Count:
    """Counts of an operator's invented calls.

    Attributes:
        judged: Calls that torch accepts and that differences could judge.
        silent: Judged calls with a silently wrong or non-finite number.
        raising: Judged calls that raise by some route, without a silent error.
        lost: Why the operator was given up: a crash of torch, or the time limit.
    """

    judged: int = 0
    silent: int = 0
    raising: int = 0
    lost: str = ""


@dataclass(frozen=True)
class MutatedAudit:
    """Result of `mutated_audit`.

    Attributes:
        torch: The version of torch.
        seed: Seed of the changes.
        counts: Counts by run, "torch" alone or "corrected", and operator.
        findings: Findings of the last run, some of each kind for each operator.
    """

    torch: str
    seed: int
    counts: Mapping[str, Mapping[str, Count]]
    findings: tuple[Finding, ...]

    def total(self, run: str) -> Count:
        """Return the sums over all operators; `lost` states how many were given up."""
        counts = self.counts[run].values()
        lost = sum(bool(each.lost) for each in counts)
        return Count(
            sum(each.judged for each in counts),
            sum(each.silent for each in counts),
            sum(each.raising for each in counts),
            f"{lost} operator{'s' * (lost > 1)} given up" if lost else "",
        )

    @property
    def silent(self) -> tuple[Finding, ...]:
        """Findings of silent errors."""
        return tuple(each for each in self.findings if each.defect.is_silent)

    def to_json(self) -> str:
        """Return the audit as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> MutatedAudit:
        """Read an audit that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            The audit.

        Raises:
            InputError: If the text is no such JSON.
        """
        try:
            data = json.loads(text)
            counts = {run: {op: Count(**each) for op, each in row.items()} for run, row in data["counts"].items()}
            return MutatedAudit(data["torch"], data["seed"], counts, tuple(map(Finding.from_json, data["findings"])))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"MutatedAudit.from_json: text: expected JSON of such an audit, got {error}.") from error

    def __str__(self) -> str:
        """Return the number of failing calls for each run, then the silent findings with their scripts."""
        lines = [f"invented calls of operators of torch {self.torch}, seed {self.seed}"]
        for run in self.counts:
            total = self.total(run)
            operators = sorted(name for name, each in self.counts[run].items() if each.silent)
            lines.append(
                f"{TITLES[run]}: {total.judged} calls, {total.silent} silently wrong, {total.raising} raise"
                f"{'; ' * bool(total.lost)}{total.lost}{': ' * bool(operators)}{', '.join(operators)}"
            )
        return "\n".join(lines + [f"\n# {each}" for each in self.silent])


def mutated_audit(
    operators: str | Iterable[str] | None = None,
    *,
    correct: bool | str = True,
    cases: int = 6,
    jobs: int = 2,
    time_limit: float = 300.0,
    seed: int = 0,
    progress: bool = False,
) -> MutatedAudit:
    r"""Measure derivatives of torch's operators at invented calls, which the database's own samples omit.

    Each sample of torch's database is changed in one way: one argument batched, or with a dimension of size 1 or 0;
    zeros, ties, equal slices, large, small and subnormal numbers; close eigenvalues and matrices that are nearly
    singular; transposed, sliced, expanded and channels-last memory; repeated indices; other options, keyword arguments,
    float32. The value is compared with torch's, and derivatives of order 1 to 3 by every route with extrapolated
    differences of the order below. A call counts if differences with other largest steps agree. A failing call must
    also fail along other directions; it is made smaller as long as it fails, and written as a script.

    Args:
        operators: Names of the database, with or without variant and module; all of them by default.
        correct: Whether hodiff's corrections are on, or ``"both"`` for both runs.
        cases: Largest number of calls to judge per operator; six take about ten minutes for all operators, on two
            cores.
        jobs: Largest number of processes.
        time_limit: Seconds for each operator and run. An operator that takes longer, or crashes, is given up.
        seed: Seed of the changes, cotangents and directions; another seed gives other calls.
        progress: Whether to show a progress bar.

    Returns:
        The counts and findings; its ``str`` has a script for each kind of silent error.

    Raises:
        HodiffError: If this build of torch lacks the database.
        InputError: If an operator is unknown, or another argument is out of range.

    Example:
        >>> found = mutated_audit("sin")  # doctest: +SKIP
        >>> found.silent  # doctest: +SKIP
        ()

    Source:
        J. Yang et al., Fuzzing automatic differentiation in deep-learning libraries (2023), for the idea.
    """
    runs = runs_of("mutated_audit", correct)
    for name, value in (("cases", cases), ("jobs", jobs)):
        require_int("mutated_audit", name, value, 1)
    require_int("mutated_audit", "seed", seed, 0)
    require_number("mutated_audit", "time_limit", time_limit, positive=True)
    counts: dict[str, dict[str, Count]] = {run: {} for run in runs}
    findings: list[Finding] = []

    def done(request: Request, reply: Reply | TimedOutError | DiedError) -> list[Request]:
        """Record the counts, and the findings of the last run."""
        run = RUNS[request["correct"]]
        if not isinstance(reply, dict):
            counts[run][request["operator"]] = Count(lost=str(reply))
            return []
        listed = reply.pop("findings")
        counts[run][request["operator"]] = Count(**reply)
        if run == runs[-1]:
            findings.extend(map(Finding.from_json, listed))
        return []

    common = {"kind": "invented", "count": cases, "seed": seed}
    requests = [{**common, "correct": run == CORRECTED} for run in runs]
    names = serve_operators(operators, requests, done, jobs=jobs, limit=time_limit, progress=progress)
    in_order = {run: {name: row[name] for name in names} for run, row in counts.items()}
    ordered = sorted(findings, key=lambda each: names.index(each.operator))
    return MutatedAudit(torch.__version__.split("+")[0], seed, in_order, tuple(ordered))


def mutated_on_file() -> MutatedAudit:
    """Return the stored audit of invented calls, by torch alone and with corrections."""
    stored = resources.files("hodiff.audit") / "data" / "mutated-2.13.json"
    return MutatedAudit.from_json(stored.read_text(encoding="utf-8"))
