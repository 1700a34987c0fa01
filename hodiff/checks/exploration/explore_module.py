"""`explore_module`: checks of a module at invented inputs, which count if it is differentiable there."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.order_by_order import in_own_dtype
from hodiff.checks.exploration.explore import OF_THE_POINT, extended, joined
from hodiff.checks.exploration.invented_conditions import MODULE_CONDITIONS, invented
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.modules.check_module import check_module, compare_module
from hodiff.checks.mutations.regularity import is_differentiable, is_twice_differentiable, steps_agree
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.report.report import Finding, Report
from hodiff.checks.subjects.module_calls import record_calls
from hodiff.checks.subjects.setting import deep_copy
from hodiff.checks.subjects.subject import Comparison, is_free, problem_of, subject_of_call
from hodiff.corrections import corrected

# Relative error from which no digit is right; 16-bit dtypes leave few digits of a second derivative anyway.
_GROSS = 0.5


def explore_module(
    report: Report,
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    fixed: Sequence[int],
    approximate: bool,
    **options: Any,
) -> Report:
    """Add findings to a module's report from conditions that its own inputs do not meet."""
    leaves, structure = tree_flatten(inputs)
    owners = [i for i, each in enumerate(inputs) for _ in tree_flatten(each)[0]]
    places = tuple(
        i for i, leaf in enumerate(leaves) if is_free(leaf) and owners[i] not in fixed and leaf.is_floating_point()
    )
    if not places:
        # Integers have no neighbouring values: only the number of rows changes.
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim())[:1]
    held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    sample = Sample(module, held, structure, places)
    known = {*report.codes, *OF_THE_POINT}
    found: dict[str, list[tuple[str, Sample, Finding]]] = {}
    tried, counted = 0, 0
    options["fixed"] = fixed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for condition, changed in invented(sample, options["seed"], MODULE_CONDITIONS) if places else ():
            tried += 1
            outcome = attempt(_judged, module, changed, approximate, known, options)
            if isinstance(outcome, list):
                counted += 1
                for finding in outcome:
                    found.setdefault(finding.code, []).append((condition, changed, finding))
    return extended(report, [joined(each) for each in found.values()], tried, counted)


def _judged(
    module: nn.Module, sample: Sample, approximate: bool, known: Collection[str], options: dict[str, Any]
) -> list[Finding] | None:
    """Return new errors at an invented input; None if the module has no finite value or no derivative there."""
    args = tree_unflatten(list(sample.leaves), sample.structure)
    dtypes = {sample.leaves[i].dtype for i in sample.places if sample.leaves[i].is_floating_point()}
    low = next((each for each in (torch.bfloat16, torch.float32) if each in dtypes), None)
    module = _arranging(module, sample)
    compared = None if approximate else compare_module(module, args, **options)
    if compared is None:
        return _errors(module, args, known, options, approximate=True)
    if not bool(compared.problem.joined_outputs(compared.problem.point).isfinite().all()):
        return None
    if any(entry.failed for entry in compared.entries):
        return _errors(module, args, known, options) if _is_sure(compared, options) else None
    return [] if low is None else [each for each in _in(low, module, args, compared, options) if each.code not in known]


def _errors(
    module: nn.Module, args: tuple[Any, ...], known: Collection[str], options: dict[str, Any], **more: Any
) -> list[Finding] | None:
    report = check_module(module, args, **options, **more)
    if OF_THE_POINT & set(report.codes):
        return None
    return [each for each in report.errors if each.code not in known]


def _mode(options: dict[str, Any]) -> AbstractContextManager[Any]:
    return corrected() if options["correct"] else nullcontext()


def _is_sure(compared: Comparison, options: dict[str, Any]) -> bool:
    """Whether the module is differentiable at the input, up to the lowest order that fails."""
    lowest = min(entry.order for entry in compared.entries if entry.failed)
    problem = compared.problem
    with _mode(options):
        if not is_differentiable(problem) or not steps_agree(problem, options["order"], options["seed"]):
            return False
        return lowest == 1 or is_twice_differentiable(problem)


def _in(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], exact: Comparison, options: dict[str, Any]
) -> list[Finding]:
    """Return findings in a lower precision: no correct digit, or an exception though the forward pass runs."""
    own = deep_copy(module).to(dtype)
    call = attempt(record_calls, own, args)
    if isinstance(call, Failure):
        return []
    generator = torch.Generator().manual_seed(options["seed"])
    subject = subject_of_call(call, options["loss"], options["wrt"], options["fixed"])
    problem = problem_of(subject, generator)
    truth = exact.problem
    problem = replace(problem, directions=truth.directions, cotangents=truth.cotangents, weights=truth.weights)
    loss = problem.loss if options["loss"] is not None else problem.curved_loss
    with _mode(options):
        entries = list(in_own_dtype(problem, loss, list(exact.levels), f"in {problem.dtypes}"))
    few = dtype.itemsize < torch.float32.itemsize
    gross = [each for each in entries if each.failed and not (few and each.error is not None and each.error < _GROSS)]
    return list(diagnose(gross, ()))


def _arranging(module: nn.Module, sample: Sample) -> nn.Module:
    """Return a copy of the module that changes the memory layout of its inputs."""
    if not sample.layouts:
        return module

    def arrange(_: nn.Module, args: Any) -> Any:
        leaves, structure = tree_flatten(args)
        laid_out = [sample.layouts[i].arrange(x) if i in sample.layouts else x for i, x in enumerate(leaves)]
        return tree_unflatten(laid_out, structure)

    own: nn.Module = deep_copy(module)
    own.register_forward_pre_hook(arrange, prepend=True)
    return own
