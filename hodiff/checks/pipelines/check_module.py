"""`check_module`: compares all routes for a whole module, and finds the submodule at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.checks.attempts import first_line
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.surrogates import declares_surrogate
from hodiff.checks.comparisons.vmapped import compile_checks
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.findings.torch_functions import custom_classes, torch_alone
from hodiff.checks.pipelines.check_function import check_function
from hodiff.checks.pipelines.fault_search import FaultSearch, stale_finding, unsteady_finding
from hodiff.checks.pipelines.function_report import title
from hodiff.checks.pipelines.module_notes import module_notes, variables_note
from hodiff.checks.probes.cause import UNRELIABLE
from hodiff.checks.progress import progress_line
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Report
from hodiff.checks.subjects.first_call import first_call
from hodiff.checks.subjects.module_calls import ModuleCall, is_repeatable
from hodiff.checks.subjects.setting import Setting, surroundings_put_back
from hodiff.checks.subjects.subject import (
    Comparison,
    Subject,
    compare_routes,
    problem_of,
    subject_of_call,
)
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.common.randomness import RandomState
from hodiff.common.trees import tensors_in
from hodiff.errors import InputError

# Defects that are only warnings if the reverse-mode routes, which transforms try first, are right.
_MISSING = {"HD401", "HD403", "HD405", "HD406", "HD408"}


def check_module(module: nn.Module, args: tuple[Any, ...], options: CheckOptions) -> Report:
    """Check a module's loss by every route on a copy in float64, and find the submodule at fault."""
    with _isolated(module):
        called = first_call(module, args)
        root = called.root
        tensors = tensors_in(called.args)
        heading = title(type(module).__name__, tensors, correct=options.correct)
        if called.unsteady is not None and not is_repeatable(root):
            return Report(heading, (), (unsteady_finding(called.unsteady, called.reason),))
        if called.stale is not None:
            return Report(heading, (), (stale_finding(called.stale),))
        _require_scalar(options.loss, root)
        both = options.wrt == "both"
        unused = tuple(set(custom_classes(root, inputs=False)) - set(custom_classes(root))) if both else ()
        # Training, without input gradients, runs these custom Functions: differentiate by parameters to check them.
        options = replace(options, wrt="parameters") if unused else options
        subject = _subject(root, options)
        if options.approximate or _declares_surrogate(module, subject):
            return _check_surrogate(module, subject, options)
        with options.mode:
            comparison = compare_routes(subject, options.order, options.seed, curved=options.loss is None)
            entries = (*comparison.entries, *_compiled(root, comparison, options))
        failed = tuple(entry for entry in comparison.entries if entry.failed)
        found = list(FaultSearch(root, failed, options).findings()) if failed else []
        found += diagnose(entries[len(comparison.entries) :], ())
        if all(entry.status == "raises" and "forward" in entry.route for entry in failed):
            found = [replace(each, severity="warning") if each.code in _MISSING else each for each in found]
        if options.correct and not UNRELIABLE & {each.code for each in found}:
            # This finding comes last, as it is a warning.
            found += torch_alone(lambda: _again(root, options.loss), comparison, options, custom_classes(root))
        notes = module_notes(module, called, subject, comparison, unused, failed)
    return Report(heading, entries, tuple(found), notes)


def compare_module(module: nn.Module, args: tuple[Any, ...], options: CheckOptions) -> Comparison | None:
    """Return the comparison of all routes, the quick part of a check; None if routes need not agree."""
    with _isolated(module):
        subject = _subject(first_call(module, args).root, options)
        if _declares_surrogate(module, subject):
            return None
        with options.mode:
            return compare_routes(subject, options.order, options.seed, curved=options.loss is None)


def _subject(root: ModuleCall, options: CheckOptions) -> Subject:
    return subject_of_call(root, options.loss, options.wrt, options.fixed)


@contextmanager
def _isolated(module: nn.Module) -> Iterator[None]:
    """Silence warnings, show progress, and restore random generators, default dtype and class attributes."""
    with (
        silence_torch_warnings(),
        progress_line(f"check of {type(module).__name__}"),
        RandomState((), foreign=True).replayed(),
        surroundings_put_back(module),
    ):
        yield


def _declares_surrogate(module: nn.Module, subject: Subject) -> bool:
    function, leaves = subject.of_leaves()
    return declares_surrogate(module, lambda *moving: tuple(tensors_in(function(*moving))), leaves)


def _check_surrogate(module: nn.Module, subject: Subject, options: CheckOptions) -> Report:
    """Check a module with surrogate derivatives as a function, comparing routes with each other."""

    @wraps(subject.function)
    def function(*inputs: Any) -> Any:
        return subject.function(*inputs)

    function.__name__ = type(module).__name__
    own = CheckOptions(options.order, vmap=False, seed=options.seed, correct=options.correct, approximate=True)
    report = check_function(function, subject.inputs, own)
    return replace(report, notes=(*report.notes, variables_note(module, subject)))


def _again(root: ModuleCall, loss: Callable[[Any], Tensor] | None) -> Callable[[], Any]:
    run = root.again()
    return run if loss is None else lambda: loss(run())


def _compiled(root: ModuleCall, comparison: Comparison, options: CheckOptions) -> Iterator[Entry]:
    """Yield comparisons of compiled with eager code."""
    if options.backend:
        # Compilers cannot trace the contexts of a setting.
        generator = torch.Generator().manual_seed(options.seed)
        problem = problem_of(_subject(replace(root, setting=Setting()), options), generator)
        size = max(level.scale for level in comparison.levels)
        yield from compile_checks(problem, options.order, size, options.backend, generator)


def _require_scalar(loss: Callable[[Any], Tensor] | None, root: ModuleCall) -> None:
    if loss is None:
        return
    try:
        with torch.no_grad():
            value = loss(root.output)
    except InputError:
        # The loss raised hodiff's own message.
        raise
    except Exception as error:
        raise InputError(
            f"check: loss: expected a function of the module's float64 output, but it raised "
            f"{first_line(error)}. Convert its tensors to float64: `target.double()`."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"check: loss: expected a floating scalar, got {got}. Reduce it: `loss.mean()`.")
