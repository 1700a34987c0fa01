"""Report of a function, from its comparisons and the causes that probes found, and the options of its check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.order_by_order import Level
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.probes.cause import Cause, no_entry
from hodiff.checks.probes.function_calls import FunctionCall, function_calls
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Report
from hodiff.checks.source_lines import class_location
from hodiff.corrections import corrected

METHODS = ("auto", "directions", "matrices")


@dataclass(frozen=True)
class Switches:
    """Options of a function's check.

    Attributes:
        order: Highest order of derivative.
        vmap: Whether to check batching.
        backend: Backend of `torch.compile`; empty to skip that comparison.
        scipy: Whether to run SciPy's differences.
        seed: Seed of all random numbers.
        method: Way in which the input is moved, one of `METHODS`.
        correct: Whether derivatives are taken within `hodiff.corrected()`, as hodiff's transforms take them.
        brief: Whether this is one of many checks of the same function. It skips torch's own checks, the comparison
            with torch alone, and the probes of domain edges, distant points and other devices.
        failed: Comparisons known to raise, if all failures raise; then routes are not compared again.
    """

    order: int = 2
    vmap: bool = True
    backend: str = ""
    scipy: bool = True
    seed: int = 0
    method: str = "auto"
    correct: bool = True
    brief: bool = False
    failed: tuple[Entry, ...] = ()

    @property
    def mode(self) -> AbstractContextManager[Any]:
        """Context in which derivatives are taken."""
        return corrected() if self.correct else nullcontext()


def calls_within(problem: ScalarProblem, f: Any) -> list[FunctionCall]:
    """Return the calls of custom Functions in a function; none if they cannot be recorded."""
    calls = attempt(function_calls, problem.function, problem.leaves, f)
    return [] if isinstance(calls, Failure) else calls


def conclude(
    f: Any,
    problem: ScalarProblem,
    entries: Sequence[Entry],
    causes: Sequence[Cause],
    calls: list[FunctionCall],
    levels: list[Level],
    notes: Iterable[str],
    *,
    correct: bool,
) -> Report:
    """Diagnose, and return the report."""
    settled = frozenset(level.order for level in levels if level.settled)
    location = class_location(f) or next((class_location(call.function) for call in calls), "")
    findings = diagnose(entries, causes, facts=_facts(f, calls), settled=settled, location=location)
    shapes = ", ".join(f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" for a in problem.leaves)
    return Report(title(_name_of(f), shapes, correct=correct), tuple(entries), findings, (*notes, *standing(problem)))


def standing(problem: ScalarProblem) -> Iterator[str]:
    """Note how many numbers of the inputs are infinite or NaN, and hence constants."""
    if problem.still:
        yield f"{problem.still} numbers of the inputs are infinite or NaN, and constants here"


def title(name: str, shapes: str, *, correct: bool) -> str:
    """Return the title of a report: name, shapes, and whether torch's rules are corrected."""
    return f"{name} at {shapes}, {'within corrected()' if correct else 'by torch alone'}"


def unrepeatable(f: Any, reason: str) -> Report:
    """Return the report of a function whose output differs from call to call."""
    cause = Cause("HD903", (reason,), no_entry, class_location(f))
    return Report(_name_of(f), (), diagnose((), [cause]))


def _name_of(f: Any) -> str:
    return str(getattr(f, "__name__", type(f).__name__))


def _facts(f: Any, calls: list[FunctionCall]) -> frozenset[str]:
    """Return facts about f that choose between codes: its kinds, and whether it has a batching rule."""
    functions = [call.function for call in calls if not call.of_operator] + ([f] if isinstance(f, type) else [])
    operators = any(call.of_operator for call in calls)
    batching = any(function.vmap is not torch.autograd.Function.vmap for function in functions)
    kinds = ["custom"] * bool(functions) + ["operator"] * operators
    return frozenset({*(kinds or ["plain"]), *(["batching"] if batching else [])})
