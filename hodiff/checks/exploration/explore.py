"""`explore`: checks at invented inputs, which count if the function is differentiable there."""

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
from hodiff.checks.exploration.invented_conditions import invented
from hodiff.checks.findings.make_finding import sorted_findings
from hodiff.checks.functions.conclusion import Switches
from hodiff.checks.mutations.regularity import is_differentiable, is_twice_differentiable, narrow, steps_agree
from hodiff.checks.mutations.sample import Sample, is_buffer
from hodiff.checks.report.report import Finding, Report
from hodiff.common.randomness import seeded
from hodiff.common.trees import tensors_in

# Checks a function at arguments, optionally against a reference function.
Check = Callable[[Any, tuple[Any, ...], Any], Report]

# Codes that make a point useless, as it cannot be judged.
OF_THE_POINT = {"HD901"}
# A rule that is wrong at first order under one condition may be wrong from a later order on under another.
_FIRST, _LATER = {"HD101", "HD102", "HD105", "HD109", "HD110"}, "HD115"
_SECOND = 2
# Largest number of elements that a finding prints.
_FEW = 12


def explore(
    report: Report, f: Any, args: tuple[Any, ...], check: Check, switches: Switches, reference: Any = None
) -> Report:
    """Add findings to a function's report from conditions that its own inputs do not meet."""
    leaves, structure = tree_flatten(args)
    places = tuple(i for i, leaf in enumerate(leaves) if is_buffer(leaf) and leaf.numel())
    held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    sample = Sample(_called(f), held, structure, places)
    known = {*report.codes, *OF_THE_POINT}
    found: dict[str, list[tuple[str, Sample, Finding]]] = {}
    tried, counted = 0, 0
    with warnings.catch_warnings():
        # Users did not ask for these points, so their warnings do not matter.
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
    """Return the report with further findings, and a note of how many inputs were tried and how many counted."""
    note = f"explored {tried} inputs around the given one, of which {counted} have a derivative to compare with"
    return replace(report, findings=sorted_findings((*report.findings, *findings)), notes=(*report.notes, note))


def _judged(
    f: Any, sample: Sample, check: Check, switches: Switches, reference: Any, known: set[str]
) -> list[Finding] | None:
    """Return new errors at an invented input; None if f has no finite value or no derivative there."""
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
    """Whether all outputs are finite; raises if f raises."""
    own = tree_map_only(Tensor, Tensor.clone, args)
    with seeded(switches.seed, tensors_in(args)), switches.mode:
        outputs = tree_flatten(_called(f)(*own))[0]
    return all(bool(y.isfinite().all()) for y in outputs if isinstance(y, Tensor))


def _sure(
    errors: list[Finding], f: Any, args: tuple[Any, ...], reference: Any, switches: Switches
) -> list[Finding] | None:
    """Return the errors up to the order at which f is differentiable; None if it is not differentiable."""
    generator = torch.Generator().manual_seed(switches.seed)
    truth = f if reference is None else reference
    with seeded(switches.seed, tensors_in(args)), switches.mode:
        problem = narrow(scalarize(_called(truth), args, generator).in_double(), generator)
        if not is_differentiable(problem) or not steps_agree(problem, switches.order, switches.seed):
            return None
        return [each for each in errors if each.order < _SECOND or is_twice_differentiable(problem)]


def _arranged(f: Any, sample: Sample) -> Any:
    """Return f with a change of its arguments' memory layouts before the call."""
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
    """Return a function, a Function class as its apply."""
    found: Callable[..., Any] = getattr(f, "apply", f) if isinstance(f, type) else f
    return found


def joined(seen: list[tuple[str, Sample, Finding]]) -> Finding:
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
        return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors)
    return ", ".join(str([round(value, 6) for value in x.flatten().tolist()] if x.dim() else x.item()) for x in tensors)
