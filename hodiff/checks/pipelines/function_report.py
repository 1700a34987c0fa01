"""Report of a function, from its comparisons and the causes that probes found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.order_by_order import Level
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.probes.cause import Cause, no_entry
from hodiff.checks.probes.function_calls import FunctionCall, function_calls
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Report
from hodiff.checks.source_lines import class_location


def calls_within(problem: ScalarProblem, f: Any) -> list[FunctionCall]:
    """Return the calls of custom Functions in a function; none if they cannot be recorded."""
    calls = attempt(function_calls, problem.function, problem.leaves, f)
    return [] if isinstance(calls, Failure) else calls


def function_report(
    f: Any,
    problem: ScalarProblem,
    entries: Sequence[Entry],
    causes: Sequence[Cause],
    calls: list[FunctionCall],
    levels: list[Level],
    notes: Iterable[str],
    options: CheckOptions,
) -> Report:
    """Diagnose, and return the report."""
    settled = frozenset(level.order for level in levels if level.settled)
    location = class_location(f) or next((class_location(call.function) for call in calls), "")
    findings = diagnose(entries, causes, facts=_facts(f, calls), settled=settled, location=location)
    heading = title(_name_of(f), problem.leaves, correct=options.correct)
    return Report(heading, tuple(entries), findings, (*notes, *constant_inputs(problem)))


def constant_inputs(problem: ScalarProblem) -> Iterator[str]:
    """Note how many numbers of the inputs are infinite or NaN, and hence constants."""
    if problem.still:
        yield f"{problem.still} numbers of the inputs are infinite or NaN, and constants here"


def title(name: str, tensors: Iterable[Tensor], *, correct: bool) -> str:
    """Return the title of a report: name, dtypes and shapes, and whether torch's rules are corrected."""
    mode = "within corrected()" if correct else "by torch alone"
    return f"{name} at {', '.join(map(dtype_and_shape, tensors))}, {mode}"


def dtype_and_shape(tensor: Tensor) -> str:
    """Describe a tensor, such as `float64[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def unrepeatable_report(f: Any, reason: str) -> Report:
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
