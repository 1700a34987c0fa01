"""Probes of equal calls that differ, and of state that a call leaves behind: HD305, HD903."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, by_reverse, every_entry
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall, cloned
from hodiff.checks.probes.rule_distances import gap_of, rounding_of
from hodiff.checks.report.data import Entry
from hodiff.checks.source_lines import rule_location

# Number of calls, which shows defects of every n-th call up to this n; large calls are repeated less.
CALLS = 24
_ELEMENTS = 4096


def repeated_calls(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Run forward and backward many times from copies of the same inputs."""
    ran = call.fresh().run()
    outputs = cloned(ran.outputs)
    saved = ran.context.tensors()
    saved = {name: t.clone() for name, t in saved.items()}
    first = cloned(ran.gradients())
    for _ in range(_count(call) - 1):
        ran = call.fresh().run()
        if _differs(call, outputs, ran.outputs):
            evidence = f"two calls of forward of {call.name} differ by {gap_of(outputs, ran.outputs):.1e}"
            return [Cause("HD903", (evidence,), every_entry, rule_location(call.function, "forward"))]
        gradients = cloned(ran.gradients())
        if _differs(call, first, gradients):
            return [_of_backward(call, saved, ran, gap_of(first, gradients))]
    return []


def _of_backward(call: FunctionCall, saved: dict[str, Tensor], ran: ForwardRun, gap: float) -> Cause:
    """Blame backward if forward saved equal tensors, else forward: equal outputs may hide other saved tensors."""
    kept = ran.context.tensors()
    if saved.keys() == kept.keys() and not _differs(call, tuple(saved.values()), tuple(kept.values())):
        evidence = f"two backward passes of {call.name} differ by {gap:.1e}"
        return Cause("HD305", (evidence,), _unsettled, rule_location(call.function, "backward", "vjp"))
    evidence = f"what two calls of forward of {call.name} save gives gradients that differ by {gap:.1e}"
    return Cause("HD903", (evidence,), every_entry, rule_location(call.function, "forward"))


def calls_between(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Run forward at other inputs between a forward and its backward."""
    ran = call.fresh().run()
    plain = cloned(call.fresh().run().gradients())
    if isinstance(attempt(lambda: beside(call).run()), Failure):
        return []
    gradients = cloned(ran.gradients())
    if not _differs(call, plain, gradients):
        return []
    evidence = (
        f"backward of {call.name} reads what the last forward left behind: after one at other numbers it is off by "
        f"{gap_of(plain, gradients):.1e}",
    )
    return [Cause("HD305", evidence, every_entry, rule_location(call.function, "backward", "vjp"))]


def beside(call: FunctionCall) -> FunctionCall:
    """Return the call at a nearby point: differentiated arguments are moved a little."""
    change = max(1e-2, 4 * call.eps)
    moved = {}
    for i in call.moves():
        steps = torch.rand(
            call.args[i].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu"
        )
        moved[i] = call.args[i] * (1 + change * steps.to(call.args[i]))
    return call.fresh().at(moved)


def _differs(call: FunctionCall, a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return gap_of(a, b) > rounding_of(call.eps)


def _count(call: FunctionCall) -> int:
    elements = sum(a.numel() for a in call.args if isinstance(a, Tensor))
    return max(2, min(CALLS, _ELEMENTS // max(1, elements)))


def _unsettled(entry: Entry) -> bool:
    """Whether the entry runs a backward, or has differences that do not settle."""
    return by_reverse(entry) or entry.status == "non-smooth"
