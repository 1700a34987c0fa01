"""`explore`: checks at invented inputs, of which those count where there is a derivative."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hodiff.checks.attempts import attempt
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.exploration.conditions import invented
from hodiff.checks.findings.diagnosis import sorted_findings
from hodiff.checks.functions.switches import Switches
from hodiff.checks.mutations.regularity import is_differentiable, is_twice_differentiable, narrow, steps_agree
from hodiff.checks.mutations.sample import Sample, is_buffer
from hodiff.checks.report.report import Finding, Report
from hodiff.common.randomness import seeded
from hodiff.common.trees import tensors_in

# Checks a function, or two that have to be the same, at arguments.
Check = Callable[[Any, tuple[Any, ...], Any], Report]

# What says of a point that it cannot be judged, and what is the same at every point.
OF_THE_POINT = {"HD901"}
# A rule that is wrong at first order under one condition may be so from a later order on under another.
_FIRST, _LATER = {"HD101", "HD102", "HD105", "HD109", "HD110"}, "HD115"
_SECOND = 2
# Numbers that a finding writes out.
_FEW = 12


def explore(
    report: Report, f: Any, args: tuple[Any, ...], check: Check, switches: Switches, reference: Any = None
) -> Report:
    """Add to a report what is wrong under conditions that its own inputs do not meet.

    Args:
        report: That of the given inputs.
        f: What is checked.
        args: The given inputs.
        check: The check, of `f`, arguments and `reference`.
        switches: What the check compares.
        reference: The same function for float64, if there is one.

    Returns:
        The report with a finding for each code that it lacks, and a note of how many inputs were tried.
    """
    leaves, structure = tree_flatten(args)
    places = tuple(i for i, leaf in enumerate(leaves) if is_buffer(leaf) and leaf.numel())
    held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    sample = Sample(_called(f), held, structure, places)
    known = {*report.codes, *OF_THE_POINT}
    found: dict[str, list[tuple[str, Sample, Finding]]] = {}
    tried, counted = 0, 0
    with warnings.catch_warnings():
        # Functions run at points that the user did not ask for.
        warnings.simplefilter("ignore")
        for condition, changed in invented(sample, switches.seed):
            tried += 1
            outcome = attempt(_judged, f, changed, check, switches, reference, known)
            if isinstance(outcome, list):
                counted += 1
                for finding in outcome:
                    found.setdefault(finding.code, []).append((condition, changed, finding))
    findings = [joined(each) for code, each in found.items() if code != _LATER or not _FIRST & found.keys()]
    return extended(report, findings, tried, counted)


def extended(report: Report, findings: list[Finding], tried: int, counted: int) -> Report:
    """The report with what was found elsewhere, and a note of how many inputs were tried and how many counted."""
    note = f"explored {tried} inputs around the given one, of which {counted} have a derivative to compare with"
    return replace(report, findings=sorted_findings((*report.findings, *findings)), notes=(*report.notes, note))


def _judged(
    f: Any, sample: Sample, check: Check, switches: Switches, reference: Any, known: set[str]
) -> list[Finding] | None:
    """The errors at an invented input that are not known; None where f does not run, or has no derivative."""
    args = tree_unflatten(list(sample.leaves), sample.structure)
    arranged = _arranged(f, sample), args, _arranged(reference, sample)
    if not _is_finite(arranged[0], args, switches):
        return None
    report = check(*arranged)
    if OF_THE_POINT & set(report.codes):
        return None
    errors = [each for each in report.errors if each.code not in known]
    return _sure(errors, *arranged, switches) if errors else []


def _is_finite(f: Any, args: tuple[Any, ...], switches: Switches) -> bool:
    """Whether all outputs are, where f runs; it raises where it does not."""
    own = tree_map_only(Tensor, Tensor.clone, args)
    with seeded(switches.seed, tensors_in(args)), switches.mode:
        outputs = tree_flatten(_called(f)(*own))[0]
    return all(bool(y.isfinite().all()) for y in outputs if isinstance(y, Tensor))


def _sure(
    errors: list[Finding], f: Any, args: tuple[Any, ...], reference: Any, switches: Switches
) -> list[Finding] | None:
    """Those up to the order to which there are derivatives; None where there is none."""
    generator = torch.Generator().manual_seed(switches.seed)
    truth = f if reference is None else reference
    with seeded(switches.seed, tensors_in(args)), switches.mode:
        problem = narrow(scalarize(_called(truth), args, generator).in_double(), generator)
        if not is_differentiable(problem) or not steps_agree(problem, switches.order, switches.seed):
            return None
        return [each for each in errors if each.order < _SECOND or is_twice_differentiable(problem)]


def _arranged(f: Any, sample: Sample) -> Any:
    """The function of tensors that are laid out in its arguments' way before it gets them."""
    if not sample.layouts or f is None:
        return f
    apply = _called(f)

    def arranged(*args: Any) -> Any:
        leaves, structure = tree_flatten(args)
        laid_out = [sample.layouts[i].arrange(x) if i in sample.layouts else x for i, x in enumerate(leaves)]
        return apply(*tree_unflatten(laid_out, structure))

    arranged.__name__ = getattr(f, "__name__", type(f).__name__)
    return arranged


def _called(f: Any) -> Callable[..., Any]:
    """A function, or a Function's apply."""
    found: Callable[..., Any] = getattr(f, "apply", f) if isinstance(f, type) else f
    return found


def joined(seen: list[tuple[str, Sample, Finding]]) -> Finding:
    """One defect, which the first condition shows and others may."""
    condition, sample, finding = seen[0]
    others = list(dict.fromkeys(each for each, _, _ in seen[1:] if each != condition))
    evidence = [f"wrong {condition}, as at {_shown(sample)}", *finding.evidence]
    if others:
        evidence.append(f"and {', '.join(others)}")
    # What raises says so, and torch itself sums a gradient whose shape alone is wrong.
    severity = "warning" if finding.kind in {"raises", "seen"} else finding.severity
    return replace(finding, severity=severity, condition=condition, message=evidence[0], evidence=tuple(evidence))


def _shown(sample: Sample) -> str:
    """The input, if it is short."""
    tensors = [sample.leaves[i] for i in sample.places]
    if sum(x.numel() for x in tensors) > _FEW:
        return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors)
    return ", ".join(str([round(value, 6) for value in x.flatten().tolist()] if x.dim() else x.item()) for x in tensors)
