"""Where a plain function leaves the graph, or a hook changes what passes it: HD101, HD104, HD106."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, of_derivatives
from hodiff.checks.probes.function_calls import LeavesFunction
from hodiff.checks.probes.torch_calls import TorchCalls
from hodiff.checks.report.data import Entry
from hodiff.graphs import leaves_made_inside

_KINDS = (("HD106", "foreign"), ("HD104", "detach"), ("HD104", "no_grad"), ("HD101", "hook"))
# What names a call of torch's own, and no operator.
_NAMED = ("no_grad", "hook")


def _without_an_error(entry: Entry) -> bool:
    return entry.status != "raises" and of_derivatives(entry)


def left_graph(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> list[Cause]:
    """Name the first call that leaves the graph, if derivatives are wrong."""
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
