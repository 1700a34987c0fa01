"""`check_function`: compares all derivatives of a function at one point, and diagnoses disagreements.

A function is compared in float64, by every route with differences and with the other routes; or, if a reference is
given, in its own dtype with the reference in float64.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.gradchecks import gradchecks
from hodiff.checks.comparisons.lost_digits import lost_digits, out_of_range
from hodiff.checks.comparisons.low_precision import against_reference, noise_note, reference_problem, with_truth
from hodiff.checks.comparisons.order_by_order import Level, against_differences, between_routes, climb, in_own_dtype
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalar_requirements import UnrepeatableError
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.comparisons.scipy_differences import against_scipy
from hodiff.checks.comparisons.surrogates import between_claims, declares_surrogate, gap, stated_errors, unjudged
from hodiff.checks.comparisons.vmapped import compile_checks, vmap_checks
from hodiff.checks.findings.make_finding import sorted_findings
from hodiff.checks.findings.torch_functions import torch_alone
from hodiff.checks.oracles.finite_differences import FARTHER
from hodiff.checks.pipelines.custom_rules import wrong_rules
from hodiff.checks.pipelines.function_report import calls_within, function_report, unrepeatable_report
from hodiff.checks.probes.cause import UNRELIABLE
from hodiff.checks.probes.function_calls import cloned
from hodiff.checks.probes.numbers_inside import cancels
from hodiff.checks.probes.probe import probe
from hodiff.checks.progress import progress_line
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Report
from hodiff.checks.subjects.subject import Comparison
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.common.randomness import seeded
from hodiff.common.trees import tensors_in

_DOUBLE = torch.finfo(torch.float64).eps
_LOST = "digits cancel inside: derivatives are compared with the tolerance of float32"
# A function with a reference need not compute in float64.
_OF_DOUBLE = {"HD306"}


def check_function(f: Any, args: tuple[Any, ...], options: CheckOptions) -> Report:
    """Check a function or a Function class, whose arguments `hodiff.check` has validated."""
    function = _applied(f) if isinstance(f, type) and issubclass(f, torch.autograd.Function) else f
    generator = torch.Generator().manual_seed(options.seed)
    name = getattr(f, "__name__", type(f).__name__)
    with silence_torch_warnings(), seeded(options.seed, tensors_in(args)), progress_line(f"check of {name}"):
        try:
            with options.mode:
                problem = scalarize(function, args, generator, options.method)
        except UnrepeatableError as error:
            return unrepeatable_report(f, str(error))
        if options.reference is None:
            return _by_routes(f, args, problem, options, generator)
        with options.mode:
            return _by_reference(f, args, problem, options, generator)


def _applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a Function's apply; if it changes inputs in place, with cloned inputs, as torch refuses leaves."""
    if "mark_dirty" not in _names_in(function.setup_context, function.forward):
        return function.apply

    @wraps(function.apply)
    def applied(*args: Any) -> Any:
        return function.apply(*cloned(args))

    return applied


def _names_in(*rules: Callable[..., Any]) -> set[str]:
    """Return the names and attributes that rules use."""
    codes = (getattr(inspect.unwrap(rule), "__code__", None) for rule in rules)
    return {name for code in codes if code is not None for name in code.co_names}


def _by_routes(
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
    levels, entries = [], [Entry("f", 0, "float64", None, None, "float64", trouble)] if trouble else []
    entries += options.failed
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
    rules = wrong_rules(problem, options)
    settings = replace(options, approximate=surrogate)
    causes = probe(f, args, problem.function, problem.leaves, calls, settings, None, rules)
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


def _by_reference(
    f: Any, args: tuple[Any, ...], own: ScalarProblem, options: CheckOptions, generator: torch.Generator
) -> Report:
    """Check a function in its own dtype against the reference in float64."""
    reference: Any = options.reference
    truth = reference_problem(own, reference, args, generator)
    levels = climb(truth, truth.loss, options.order, generator)
    entries = against_reference(own, truth, levels, options.order, options.ulps, generator)
    size = max([1e-300, *(float(y.abs().max()) for y in own.function(*own.leaves) if y.numel())])
    if options.vmap:
        entries += vmap_checks(own, options.order, size, generator)
    calls = with_truth(calls_within(own, f), f, reference)
    causes = probe(f, args, own.function, own.leaves, calls, options, truth.function, wrong_rules(own, options))
    causes = [cause for cause in causes if cause.code not in _OF_DOUBLE]
    return function_report(f, own, entries, causes, calls, levels, noise_note(own, truth), options)
