"""Diagnosis of overflow and underflow inside: comparisons that fail only until inputs are made smaller."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.orders import Level, against_differences, between_routes, climb, evaluate_route
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.probes.cause import Cause
from hodiff.checks.probes.numbers_inside import numbers_inside
from hodiff.checks.report.data import Entry

# Divisors of the inputs, tried until all numbers are in range.
_SMALLER = (4.0, 16.0, 64.0, 256.0, 1024.0)
_FAILED = {"wrong", "zero", "non-finite", "non-smooth", "fails"}


def out_of_range(problem: ScalarProblem, levels: Sequence[Level], entries: Sequence[Entry]) -> list[Cause]:
    """Return the cause that numbers overflow or vanish inside, if every route is right at smaller inputs.

    Args:
        problem: The function at its point.
        levels: Its derivatives.
        entries: The comparisons.

    Returns:
        At most one cause.
    """
    failed = [entry for entry in entries if entry.failed]
    known = set(map(id, failed))
    if not failed or any(entry.status not in _FAILED for entry in failed) or not _leaves_range(problem, levels):
        return []
    for part in _SMALLER:
        smaller = replace(problem, leaves=tuple(leaf / part for leaf in problem.leaves))
        found = attempt(_climbed, smaller, len(levels))
        if isinstance(found, Failure) or _leaves_range(smaller, found):
            continue
        if any(entry.failed for entry in (*against_differences(found, len(levels)), *between_routes(found))):
            return []
        evidence = f"numbers inside overflow or vanish; at inputs {part:g} times as small every route is right"
        return [Cause("HD111", (evidence,), lambda entry: id(entry) in known, severity="error", in_function=True)]
    return []


def _climbed(problem: ScalarProblem, order: int) -> list[Level]:
    return climb(problem, problem.loss, order, torch.Generator().manual_seed(0), by_differences=False)


def _leaves_range(problem: ScalarProblem, levels: Collection[Level]) -> bool:
    """Whether numbers in the computation of values or derivatives overflow or underflow."""

    def everything() -> None:
        problem.joined_outputs(problem.point)
        for level in levels:
            for route in level.outcomes:
                evaluate_route(problem.loss, route, problem.point, level.tuples, level.free)

    seen = attempt(lambda: numbers_inside(everything))
    return not isinstance(seen, Failure) and seen.left_range
