"""Probe of plain functions that leave the graph, change gradients or change inputs: HD101, HD104, HD106, HD303."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, of_derivatives
from hodiff.checks.probes.function_calls import LeavesFunction
from hodiff.checks.probes.torch_calls import TorchCalls
from hodiff.checks.report.data import Entry
from hodiff.common.complex_numbers import equal_with_nan
from hodiff.graphs import leaves_made_inside

_KINDS = (("HD106", "foreign"), ("HD104", "detach"), ("HD104", "no_grad"), ("HD101", "hook"))
# Kinds whose names are never operators.
_NAMED = ("no_grad", "hook")


def _without_an_error(entry: Entry) -> bool:
    return entry.status != "raises" and of_derivatives(entry)


def _differs(entry: Entry) -> bool:
    """Whether a derivative differs, except that torch refuses to write into a leaf."""
    return _without_an_error(entry) and not entry.detail.startswith("RuntimeError")


def changed_inputs(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the inputs that a call changes, at the point or at 1.5 times the inputs."""
    for factor in (1.0, 1.5):  # inputs at the point may be clipped already
        before = [factor * leaf.detach() for leaf in leaves]
        own = [leaf.clone() for leaf in before]
        with torch.no_grad():
            attempt(function, *own)
        changed = [leaf for leaf, after in zip(before, own, strict=True) if not equal_with_nan(leaf, after)]
        if changed:
            return changed
    return []


def left_graph(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> list[Cause]:
    """Report the first call that leaves the graph, if derivatives are wrong."""
    written = changed_inputs(function, leaves)
    if written:
        evidence = (f"a tensor of shape {tuple(written[0].shape)} is another after the call",)
        return [Cause("HD303", evidence, _differs, needs_symptom=True, in_function=True)]
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad(), TorchCalls() as trace:
        outputs = attempt(function, *tracked)
    for code, kind in _KINDS:
        # Operators of torch.library raise their own errors about missing rules.
        steps = [step for step in trace.of(kind) if step.location and (kind in _NAMED or "." not in step.name)]
        if steps:
            evidence = (f"the function calls {steps[0].name}",)
            return [Cause(code, evidence, _without_an_error, steps[0].location, needs_symptom=True, in_function=True)]
    own = [] if isinstance(outputs, Failure) else leaves_made_inside(outputs, lambda: function(*tracked))
    if own:
        evidence = (f"the function makes a leaf of its own of shape {tuple(own[0].shape)}, as by nn.Parameter",)
        return [Cause("HD104", evidence, _without_an_error, needs_symptom=True, in_function=True)]
    return []
