"""Where a plain function leaves the graph, or changes what passes it or comes in: HD101, HD104, HD106, HD303."""

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
# What names a call of torch's own, and no operator.
_NAMED = ("no_grad", "hook")


def _without_an_error(entry: Entry) -> bool:
    return entry.status != "raises" and of_derivatives(entry)


def _differs(entry: Entry) -> bool:
    """Not that torch refuses to write into a leaf."""
    return _without_an_error(entry) and not entry.detail.startswith("RuntimeError")


def changed_inputs(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """The inputs that a call writes into, here or where they are larger; none where it raises."""
    for factor in (1.0, 1.5):  # what clips them has done so before at the point
        before = [factor * leaf.detach() for leaf in leaves]
        own = [leaf.clone() for leaf in before]
        with torch.no_grad():
            attempt(function, *own)
        changed = [leaf for leaf, after in zip(before, own, strict=True) if not equal_with_nan(leaf, after)]
        if changed:
            return changed
    return []


def left_graph(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> list[Cause]:
    """Name the first call that leaves the graph, if derivatives are wrong."""
    written = changed_inputs(function, leaves)
    if written:
        evidence = (f"a tensor of shape {tuple(written[0].shape)} is another after the call",)
        return [Cause("HD303", evidence, _differs, needs_symptom=True, in_function=True)]
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad(), TorchCalls() as trace:
        outputs = attempt(function, *tracked)
    for code, kind in _KINDS:
        # An operator of torch.library says itself what it lacks.
        steps = [step for step in trace.of(kind) if step.location and (kind in _NAMED or "." not in step.name)]
        if steps:
            evidence = (f"the function calls {steps[0].name}",)
            return [Cause(code, evidence, _without_an_error, steps[0].location, needs_symptom=True, in_function=True)]
    own = [] if isinstance(outputs, Failure) else leaves_made_inside(outputs, lambda: function(*tracked))
    if own:
        evidence = (f"the function makes a leaf of its own of shape {tuple(own[0].shape)}, as by nn.Parameter",)
        return [Cause("HD104", evidence, _without_an_error, needs_symptom=True, in_function=True)]
    return []
