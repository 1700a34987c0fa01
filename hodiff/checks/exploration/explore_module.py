"""`explore_module`: checks of a module at invented inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.order_by_order import in_own_dtype
from hodiff.checks.exploration.explore import extended, findings_around, laid_out, new_errors, sample_of
from hodiff.checks.exploration.invented_conditions import MODULE_CONDITIONS
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.mutations.regularity import is_differentiable, is_twice_differentiable, steps_agree
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.pipelines.check_module import check_module, compare_module
from hodiff.checks.report.report import Finding, Report
from hodiff.checks.subjects.module_calls import record_calls
from hodiff.checks.subjects.setting import deep_copy
from hodiff.checks.subjects.subject import Comparison, is_free, problem_of, subject_of_call

# Relative error from which no digit is right; 16-bit dtypes leave few digits of a second derivative anyway.
_GROSS = 0.5


def explore_module(report: Report, module: nn.Module, args: tuple[Any, ...], options: CheckOptions) -> Report:
    """Add findings to a module's report from conditions that its own inputs do not meet."""
    options = replace(options, backend="")

    def is_varied(position: int, leaf: Any) -> bool:
        return is_free(leaf) and position not in options.fixed and leaf.is_floating_point()

    def judge(sample: Sample, args: tuple[Any, ...], known: set[str]) -> list[Finding] | None:
        own = _arranged(module, sample)
        compared = None if options.approximate else compare_module(own, args, options)
        if compared is None:
            return new_errors(check_module(own, args, replace(options, approximate=True)), known)
        if not bool(compared.problem.joined_outputs(compared.problem.point).isfinite().all()):
            return None
        if any(entry.failed for entry in compared.entries):
            return new_errors(check_module(own, args, options), known) if _is_sure(compared, options) else None
        dtypes = {sample.leaves[i].dtype for i in sample.places}
        low = next((each for each in (torch.bfloat16, torch.float32) if each in dtypes), None)
        found = [] if low is None else _in_low_precision(low, own, args, compared, options)
        return [each for each in found if each.code not in known]

    sample = sample_of(module, args, is_varied)
    if not sample.places:
        # Integers have no neighbouring values: only the number of rows changes.
        sized = (i for i, leaf in enumerate(sample.leaves) if isinstance(leaf, Tensor) and leaf.dim())
        sample = replace(sample, places=tuple(sized)[:1])
    found, note = findings_around(report, sample, judge, options.seed, MODULE_CONDITIONS)
    return extended(report, found.values(), note)


def _is_sure(compared: Comparison, options: CheckOptions) -> bool:
    """Whether the module is differentiable at the input, up to the lowest order that fails."""
    lowest = min(entry.order for entry in compared.entries if entry.failed)
    problem = compared.problem
    with options.mode:
        if not is_differentiable(problem) or not steps_agree(problem, options.order, options.seed):
            return False
        return lowest == 1 or is_twice_differentiable(problem)


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


def _arranged(module: nn.Module, sample: Sample) -> nn.Module:
    """Return a copy of the module that changes the memory layout of its inputs."""
    if not sample.layouts:
        return module
    own: nn.Module = deep_copy(module)
    own.register_forward_pre_hook(lambda _, args: laid_out(sample, args), prepend=True)
    return own
