"""Check of a function in float64: every route against differences, the other routes, and numbers out of range."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.gradchecks import gradchecks
from hodiff.checks.comparisons.lost_digits import lost_digits
from hodiff.checks.comparisons.order_by_order import (
    Level,
    against_differences,
    between_routes,
    climb,
    evaluate_route,
    in_own_dtype,
)
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scipy_differences import against_scipy
from hodiff.checks.comparisons.surrogates import between_claims, declares_surrogate, gap, stated_errors, unjudged
from hodiff.checks.comparisons.vmapped import compile_checks, vmap_checks
from hodiff.checks.findings.make_finding import sorted_findings
from hodiff.checks.findings.torch_functions import torch_alone
from hodiff.checks.oracles.finite_differences import FARTHER
from hodiff.checks.pipelines.function_report import calls_within, function_report
from hodiff.checks.probes.cause import UNRELIABLE, Cause
from hodiff.checks.probes.numbers_inside import cancels, numbers_inside
from hodiff.checks.probes.probe import probe
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Report
from hodiff.checks.subjects.subject import Comparison

# Divisors of the inputs, tried until all numbers are in range.
_SMALLER = (4.0, 16.0, 64.0, 256.0, 1024.0)
_FAILED = {"wrong", "zero", "non-finite", "non-smooth", "fails"}


def out_of_range(problem: ScalarProblem, levels: Sequence[Level], entries: Sequence[Entry]) -> list[Cause]:
    """Return the cause that numbers overflow or vanish inside, if every route is right at smaller inputs."""
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


_DOUBLE = torch.finfo(torch.float64).eps
_LOST = "digits cancel inside: derivatives are compared with the tolerance of float32"


def check_by_routes(
    f: Any, args: tuple[Any, ...], own: ScalarProblem, options: CheckOptions, generator: torch.Generator
) -> Report:
    """Check a function in float64 and in its inputs' own dtypes; then report what torch alone gets wrong."""
    with options.mode:
        report, problem, levels = _report(f, args, own, options, generator)
    if options.brief or not options.correct or not levels or UNRELIABLE & set(report.codes):
        return report
    comparison = Comparison(problem, problem.loss, levels)
    functions = dict.fromkeys(call.function for call in calls_within(problem, f))

    def prepare() -> Callable[[], Any]:
        return partial(problem.function, *(leaf.clone() for leaf in problem.leaves))

    warnings = torch_alone(prepare, comparison, options, tuple(functions))
    return replace(report, findings=sorted_findings((*report.findings, *warnings)))


def _report(
    f: Any, args: tuple[Any, ...], own: ScalarProblem, options: CheckOptions, generator: torch.Generator
) -> tuple[Report, ScalarProblem, list[Level]]:
    """Return the report, the problem in float64, and its derivatives if differences judge them."""
    problem, trouble, lost = _in_double(own)
    surrogate = options.approximate or declares_surrogate(f, problem.function, problem.leaves)
    levels, entries = [], [*_trouble(trouble), *options.failed]
    if not options.failed:
        levels = climb(problem, problem.loss, options.order, generator)
        entries += against_differences(levels, options.order)
        if surrogate:
            # Differences do not judge a claimed derivative: its routes are compared with each other.
            entries += between_claims(problem, options.order, generator)
        else:
            entries += _entries(own, problem, levels, options, generator, in_double=not (trouble or lost))
        entries += _transformed(problem, levels, options, generator)
    calls = calls_within(problem, f)
    causes = probe(f, args, problem.function, problem.leaves, calls, replace(options, approximate=surrogate))
    if not surrogate:
        digits = lost_digits(problem, levels, entries, {cause.code for cause in causes})
        causes = [*(digits or out_of_range(problem, levels, entries)), *causes]
    if surrogate:
        entries = list(unjudged(entries))
        causes.append(gap(entries))
    notes = (*lost, *stated_errors(f, args, options.order))
    report = function_report(f, own, entries, causes, calls, levels, notes, options)
    return report, problem, [] if surrogate else levels


def _in_double(own: ScalarProblem) -> tuple[ScalarProblem, str, tuple[str, ...]]:
    """Return f's problem in float64; where f cannot compute in it or loses digits, with a coarser rounding."""
    double = attempt(own.in_double)
    if isinstance(double, Failure):
        return own, f"f raises for float64 inputs: {double.message}", ()
    if double.eps > _DOUBLE:
        return own, "f returns a lower precision than float64 for float64 inputs", ()
    if attempt(double.is_coarse) is True:
        coarse = replace(double, eps=max(own.eps, torch.finfo(torch.float32).eps))
        if attempt(_cancels, double) is True:
            return coarse, "", (_LOST,)
        return coarse, "f returns float64, but ignores changes below the precision of float32", ()
    return double, "", ()


def _cancels(problem: ScalarProblem) -> bool:
    leaves = tuple(leaf.clone() for leaf in problem.leaves)
    with torch.no_grad():
        outputs = problem.function(*(leaf.clone() for leaf in leaves))
    size = max(float(t.abs().max()) for t in (*problem.leaves, *outputs) if t.numel())
    return cancels(lambda: problem.function(*leaves), size)


def _trouble(trouble: str) -> Iterator[Entry]:
    if trouble:
        yield Entry("f", 0, "float64", None, None, "float64", trouble)


def _entries(
    own: ScalarProblem,
    problem: ScalarProblem,
    levels: list[Level],
    options: CheckOptions,
    generator: torch.Generator,
    *,
    in_double: bool,
) -> Iterator[Entry]:
    order = options.order
    yield from between_routes(levels)
    if options.scipy:
        yield from against_scipy(problem, problem.loss, levels)
    yield from against_differences(climb(problem, problem.curved_loss, order, generator), order, "curved loss")
    if own.eps > problem.eps:
        yield from in_own_dtype(own, own.loss, levels, f"in {own.dtypes}")
    if in_double and not options.brief:
        # gradcheck's default step is 1e-6 (for inputs of size 1); scale it down if differences needed smaller steps.
        step = min(level.differences.step for level in levels)
        short = 2.0 ** round(math.log2(step) + 15) if 0 < step < problem.step * FARTHER else None
        yield from gradchecks(problem, order, options.vmap, options.seed, short)


def _transformed(
    problem: ScalarProblem, levels: list[Level], options: CheckOptions, generator: torch.Generator
) -> Iterator[Entry]:
    size = max(level.scale for level in levels)
    if options.vmap:
        yield from vmap_checks(problem, options.order, size, generator)
    if options.backend:
        yield from compile_checks(problem, options.order, size, options.backend, generator)
