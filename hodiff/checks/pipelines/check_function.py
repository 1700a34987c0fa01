"""`check_function`: compares all derivatives of a function at one point, and diagnoses disagreements."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.low_precision import against_reference, noise_note, reference_problem, with_truth
from hodiff.checks.comparisons.order_by_order import climb
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalar_requirements import UnrepeatableError
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.comparisons.vmapped import vmap_checks
from hodiff.checks.pipelines.check_by_routes import check_by_routes
from hodiff.checks.pipelines.function_report import calls_within, function_report, unrepeatable_report
from hodiff.checks.probes.function_calls import cloned
from hodiff.checks.probes.probe import probe
from hodiff.checks.progress import progress_line
from hodiff.checks.report.report import Report
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.common.randomness import seeded
from hodiff.common.trees import tensors_in

# A function with a reference need not compute in float64.
_OF_DOUBLE = {"HD306"}


def check_by_reference(
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
    causes = probe(f, args, own.function, own.leaves, calls, options, truth.function)
    causes = [cause for cause in causes if cause.code not in _OF_DOUBLE]
    return function_report(f, own, entries, causes, calls, levels, noise_note(own, truth), options)


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
            return check_by_routes(f, args, problem, options, generator)
        with options.mode:
            return check_by_reference(f, args, problem, options, generator)


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
