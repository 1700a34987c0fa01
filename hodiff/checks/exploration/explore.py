"""Checks of functions and modules at invented inputs, which count if the function is differentiable there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.order_by_order import in_own_dtype
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.exploration.invented_conditions import CONDITIONS, MODULE_CONDITIONS, Condition, invented
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.findings.make_finding import sorted_findings
from hodiff.checks.mutations.regularity import is_differentiable, is_twice_differentiable, narrow, steps_agree
from hodiff.checks.mutations.sample import Sample, is_buffer
from hodiff.checks.pipelines.check_function import check_function
from hodiff.checks.pipelines.check_module import check_module, compare_module
from hodiff.checks.pipelines.function_report import dtype_and_shape
from hodiff.checks.report.report import Finding, Report
from hodiff.checks.subjects.module_calls import record_calls
from hodiff.checks.subjects.setting import deep_copy
from hodiff.checks.subjects.subject import Comparison, is_free, problem_of, subject_of_call
from hodiff.common.randomness import seeded
from hodiff.common.trees import tensors_in

# Returns the findings at a sample and its arguments with other codes than those given; None if they do not count.
Judge = Callable[[Sample, tuple[Any, ...], set[str]], list[Finding] | None]

# Codes that make a point useless, as it cannot be judged.
_OF_THE_POINT = {"HD901"}
# A rule that is wrong at first order under one condition may be wrong from a later order on under another.
_FIRST, _LATER = {"HD101", "HD102", "HD105", "HD109", "HD110"}, "HD115"
_SECOND = 2
# Relative error from which no digit is right; 16-bit dtypes leave few digits of a second derivative anyway.
_GROSS = 0.5
# Largest number of elements that a finding prints.
_FEW = 12


def explore_function(report: Report, f: Any, args: tuple[Any, ...], options: CheckOptions) -> Report:
    """Add findings to a function's report from conditions that its own inputs do not meet."""
    options = replace(options, scipy=False, backend="", brief=True)

    def judge(sample: Sample, args: tuple[Any, ...], known: set[str]) -> list[Finding] | None:
        own, reference = _arranged(f, sample), _arranged(options.reference, sample)
        if not _is_finite(own, args, options):
            return None
        errors = _new_errors(check_function(own, args, replace(options, reference=reference)), known)
        return _sure(errors, own if reference is None else reference, args, options) if errors else errors

    sample = _sample_of(_called(f), args, lambda _, leaf: is_buffer(leaf) and bool(leaf.numel()))
    found, note = _findings_around(report, sample, judge, options.seed, CONDITIONS)
    wrong_at_first = not _FIRST.isdisjoint(found)
    return _extended(report, (each for code, each in found.items() if code != _LATER or not wrong_at_first), note)


def explore_module(report: Report, module: nn.Module, args: tuple[Any, ...], options: CheckOptions) -> Report:
    """Add findings to a module's report from conditions that its own inputs do not meet."""
    options = replace(options, backend="")

    def is_varied(position: int, leaf: Any) -> bool:
        return is_free(leaf) and position not in options.fixed and leaf.is_floating_point()

    def judge(sample: Sample, args: tuple[Any, ...], known: set[str]) -> list[Finding] | None:
        own = module
        if sample.layouts:
            own = deep_copy(module)
            own.register_forward_pre_hook(lambda _, args: _laid_out(sample, args), prepend=True)
        compared = None if options.approximate else compare_module(own, args, options)
        if compared is None:
            return _new_errors(check_module(own, args, replace(options, approximate=True)), known)
        if not bool(compared.problem.joined_outputs(compared.problem.point).isfinite().all()):
            return None
        orders = [entry.order for entry in compared.entries if entry.failed]
        if orders:
            with options.mode:
                sure = _is_regular(compared.problem, options) and (
                    min(orders) < _SECOND or is_twice_differentiable(compared.problem)
                )
            return _new_errors(check_module(own, args, options), known) if sure else None
        dtypes = {sample.leaves[i].dtype for i in sample.places}
        low = next((each for each in (torch.bfloat16, torch.float32) if each in dtypes), None)
        found = [] if low is None else _in_low_precision(low, own, args, compared, options)
        return [each for each in found if each.code not in known]

    sample = _sample_of(module, args, is_varied)
    if not sample.places:
        # Integers have no neighbouring values: only the number of rows changes.
        sized = (i for i, leaf in enumerate(sample.leaves) if isinstance(leaf, Tensor) and leaf.dim())
        sample = replace(sample, places=tuple(sized)[:1])
    found, note = _findings_around(report, sample, judge, options.seed, MODULE_CONDITIONS)
    return _extended(report, found.values(), note)


def _findings_around(
    report: Report, sample: Sample, judge: Judge, seed: int, conditions: Sequence[Condition]
) -> tuple[dict[str, Finding], str]:
    """Return a finding for each new code, and a note of how many inputs were tried and how many counted."""
    known = {*report.codes, *_OF_THE_POINT}
    found: dict[str, list[tuple[str, Sample, Finding]]] = {}
    tried, counted = 0, 0
    with warnings.catch_warnings():
        # Users did not ask for these points, so their warnings do not matter.
        warnings.simplefilter("ignore")
        for condition, changed in invented(sample, seed, conditions):
            tried += 1
            args = tree_unflatten(list(changed.leaves), changed.structure)
            outcome = attempt(judge, changed, args, known)
            if isinstance(outcome, list):
                counted += 1
                for finding in outcome:
                    found.setdefault(finding.code, []).append((condition, changed, finding))
    note = f"explored {tried} inputs around the given one, of which {counted} have a derivative to compare with"
    return {code: _joined(each) for code, each in found.items()}, note


def _joined(seen: list[tuple[str, Sample, Finding]]) -> Finding:
    """Return one finding for a defect; the first condition is its condition, other conditions are evidence."""
    condition, sample, finding = seen[0]
    others = list(dict.fromkeys(each for each, _, _ in seen[1:] if each != condition))
    evidence = [f"wrong {condition}, as at {_shown(sample)}", *finding.evidence]
    if others:
        evidence.append(f"and {', '.join(others)}")
    # Exceptions are not silent, and torch itself reduces gradients that only have the wrong shape.
    severity = "warning" if finding.kind in {"raises", "seen"} else finding.severity
    return replace(finding, severity=severity, condition=condition, message=evidence[0], evidence=tuple(evidence))


def _shown(sample: Sample) -> str:
    """Return the input's numbers if they are few, else its dtypes and shapes."""
    tensors = [sample.leaves[i] for i in sample.places]
    if sum(x.numel() for x in tensors) > _FEW:
        return ", ".join(map(dtype_and_shape, tensors))
    return ", ".join(str([round(value, 6) for value in x.flatten().tolist()] if x.dim() else x.item()) for x in tensors)


def _extended(report: Report, findings: Iterable[Finding], note: str) -> Report:
    """Return the report with further findings and a note."""
    return replace(report, findings=sorted_findings((*report.findings, *findings)), notes=(*report.notes, note))


def _new_errors(report: Report, known: set[str]) -> list[Finding] | None:
    """Return the errors with other codes; None if the point cannot be judged."""
    if _OF_THE_POINT & set(report.codes):
        return None
    return [each for each in report.errors if each.code not in known]


def _sample_of(call: Callable[..., Any], args: tuple[Any, ...], is_varied: Callable[[int, Any], bool]) -> Sample:
    """Return the call at its arguments; `is_varied` tells from the position of an argument and a leaf in it."""
    leaves, structure = tree_flatten(args)
    positions = [i for i, each in enumerate(args) for _ in tree_leaves(each)]
    places = tuple(i for i, leaf in enumerate(leaves) if is_varied(positions[i], leaf))
    held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Sample(call, held, structure, places)


def _arranged(f: Any, sample: Sample) -> Any:
    """Return f with a change of its arguments' memory layouts before the call."""
    if not sample.layouts or f is None:
        return f
    apply = _called(f)

    def arranged(*args: Any) -> Any:
        return apply(*_laid_out(sample, args))

    arranged.__name__ = getattr(f, "__name__", type(f).__name__)
    return arranged


def _laid_out(sample: Sample, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments in the memory layouts of the sample."""
    leaves, structure = tree_flatten(args)
    arranged = [sample.layouts[i].arrange(x) if i in sample.layouts else x for i, x in enumerate(leaves)]
    laid: tuple[Any, ...] = tree_unflatten(arranged, structure)
    return laid


def _called(f: Any) -> Callable[..., Any]:
    """Return a function, a Function class as its apply."""
    found: Callable[..., Any] = getattr(f, "apply", f) if isinstance(f, type) else f
    return found


def _is_finite(f: Any, args: tuple[Any, ...], options: CheckOptions) -> bool:
    """Whether all outputs are finite; raises if f raises."""
    own = tree_map_only(Tensor, Tensor.clone, args)
    with seeded(options.seed, tensors_in(args)), options.mode:
        outputs = tree_leaves(_called(f)(*own))
    return all(bool(y.isfinite().all()) for y in outputs if isinstance(y, Tensor))


def _sure(errors: list[Finding], truth: Any, args: tuple[Any, ...], options: CheckOptions) -> list[Finding] | None:
    """Return the errors up to the order at which a function is differentiable; None if it is not differentiable."""
    generator = torch.Generator().manual_seed(options.seed)
    with seeded(options.seed, tensors_in(args)), options.mode:
        problem = narrow(scalarize(_called(truth), args, generator).in_double(), generator)
        if not _is_regular(problem, options):
            return None
        return [each for each in errors if each.order < _SECOND or is_twice_differentiable(problem)]


def _is_regular(problem: ScalarProblem, options: CheckOptions) -> bool:
    return is_differentiable(problem) and steps_agree(problem, options.order, options.seed)


def _in_low_precision(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], exact: Comparison, options: CheckOptions
) -> list[Finding]:
    """Return findings in a lower precision: no correct digit, or an exception though the forward pass runs."""
    call = attempt(record_calls, deep_copy(module).to(dtype), args)
    if isinstance(call, Failure):
        return []
    generator = torch.Generator().manual_seed(options.seed)
    problem = problem_of(subject_of_call(call, options.loss, options.wrt, options.fixed), generator)
    truth = exact.problem
    problem = replace(problem, directions=truth.directions, cotangents=truth.cotangents, weights=truth.weights)
    loss = problem.loss if options.loss is not None else problem.curved_loss
    with options.mode:
        entries = list(in_own_dtype(problem, loss, list(exact.levels), f"in {problem.dtypes}"))
    few = dtype.itemsize < torch.float32.itemsize
    gross = [each for each in entries if each.failed and not (few and each.error is not None and each.error < _GROSS)]
    return list(diagnose(gross, ()))
