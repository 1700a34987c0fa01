"""`explore_function`: checks of a function at invented inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.exploration.explore import extended, findings_around, laid_out, new_errors, sample_of
from hodiff.checks.exploration.invented_conditions import CONDITIONS
from hodiff.checks.mutations.regularity import is_differentiable, is_twice_differentiable, narrow, steps_agree
from hodiff.checks.mutations.sample import Sample, is_buffer
from hodiff.checks.pipelines.check_function import check_function
from hodiff.checks.report.report import Finding, Report
from hodiff.common.randomness import seeded
from hodiff.common.trees import tensors_in

# A rule that is wrong at first order under one condition may be wrong from a later order on under another.
_FIRST, _LATER = {"HD101", "HD102", "HD105", "HD109", "HD110"}, "HD115"
_SECOND = 2


def explore_function(report: Report, f: Any, args: tuple[Any, ...], options: CheckOptions) -> Report:
    """Add findings to a function's report from conditions that its own inputs do not meet."""
    options = replace(options, scipy=False, backend="", brief=True)

    def judge(sample: Sample, args: tuple[Any, ...], known: set[str]) -> list[Finding] | None:
        own, reference = _arranged(f, sample), _arranged(options.reference, sample)
        if not _is_finite(own, args, options):
            return None
        errors = new_errors(check_function(own, args, replace(options, reference=reference)), known)
        return _sure(errors, own if reference is None else reference, args, options) if errors else errors

    sample = sample_of(_called(f), args, lambda _, leaf: is_buffer(leaf) and bool(leaf.numel()))
    found, note = findings_around(report, sample, judge, options.seed, CONDITIONS)
    wrong_at_first = not _FIRST.isdisjoint(found)
    return extended(report, (each for code, each in found.items() if code != _LATER or not wrong_at_first), note)


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
        if not is_differentiable(problem) or not steps_agree(problem, options.order, options.seed):
            return None
        return [each for each in errors if each.order < _SECOND or is_twice_differentiable(problem)]


def _arranged(f: Any, sample: Sample) -> Any:
    """Return f with a change of its arguments' memory layouts before the call."""
    if not sample.layouts or f is None:
        return f
    apply = _called(f)

    def arranged(*args: Any) -> Any:
        return apply(*laid_out(sample, args))

    arranged.__name__ = getattr(f, "__name__", type(f).__name__)
    return arranged


def _called(f: Any) -> Callable[..., Any]:
    """Return a function, a Function class as its apply."""
    found: Callable[..., Any] = getattr(f, "apply", f) if isinstance(f, type) else f
    return found
