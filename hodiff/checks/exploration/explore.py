"""Checks at invented inputs, which count if the function is differentiable there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hodiff.checks.attempts import attempt
from hodiff.checks.exploration.invented_conditions import Condition, invented
from hodiff.checks.findings.make_finding import sorted_findings
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.pipelines.function_report import dtype_and_shape
from hodiff.checks.report.report import Finding, Report

# Returns the findings at a sample and its arguments with other codes than those given; None if they do not count.
Judge = Callable[[Sample, tuple[Any, ...], set[str]], list[Finding] | None]

# Codes that make a point useless, as it cannot be judged.
OF_THE_POINT = {"HD901"}
# Largest number of elements that a finding prints.
_FEW = 12


def findings_around(
    report: Report, sample: Sample, judge: Judge, seed: int, conditions: Sequence[Condition]
) -> tuple[dict[str, Finding], str]:
    """Return a finding for each new code, and a note of how many inputs were tried and how many counted."""
    known = {*report.codes, *OF_THE_POINT}
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


def extended(report: Report, findings: Iterable[Finding], note: str) -> Report:
    """Return the report with further findings and a note."""
    return replace(report, findings=sorted_findings((*report.findings, *findings)), notes=(*report.notes, note))


def new_errors(report: Report, known: set[str]) -> list[Finding] | None:
    """Return the errors with other codes; None if the point cannot be judged."""
    if OF_THE_POINT & set(report.codes):
        return None
    return [each for each in report.errors if each.code not in known]


def sample_of(call: Callable[..., Any], args: tuple[Any, ...], is_varied: Callable[[int, Any], bool]) -> Sample:
    """Return the call at its arguments; `is_varied` tells from the position of an argument and a leaf in it."""
    leaves, structure = tree_flatten(args)
    positions = [i for i, each in enumerate(args) for _ in tree_flatten(each)[0]]
    places = tuple(i for i, leaf in enumerate(leaves) if is_varied(positions[i], leaf))
    held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Sample(call, held, structure, places)


def laid_out(sample: Sample, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments in the memory layouts of the sample."""
    leaves, structure = tree_flatten(args)
    arranged = [sample.layouts[i].arrange(x) if i in sample.layouts else x for i, x in enumerate(leaves)]
    laid: tuple[Any, ...] = tree_unflatten(arranged, structure)
    return laid


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
