"""Probes that differentiate rules again: derivatives of a rule by autograd against differences of it.

A rule is a function of its saved tensors, of attributes of ctx, and of incoming gradients or tangents. Autograd through
the rule and differences of it agree unless the rule cuts the graph. If they agree, and second derivatives are wrong
anyway, the rule reads a tensor whose dependence on the inputs is lost.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, forward_differentiated, reverse_differentiated
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall
from hodiff.checks.probes.rule_derivatives import Slope, slopes_of
from hodiff.checks.probes.torch_calls import TorchCalls
from hodiff.checks.source_lines import mentions, rule_location
from hodiff.graphs import is_once_differentiable


def backward_slopes(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report why backward cannot be differentiated: HD103, HD104, HD106, HD107, HD115, HD116."""
    location = rule_location(call.function, "backward", "vjp")
    once = is_once_differentiable(call.function)
    if once:
        evidence = (f"backward of {call.name} is marked once_differentiable",)
        marked = mentions(inspect.unwrap(call.backward), "once_differentiable") or location
        return [Cause("HD107", evidence, reverse_differentiated, marked)]
    ran = call.fresh().run()
    incoming = ran.cotangents(generator)
    slopes = slopes_of(ran, "backward", incoming, generator)
    cut = [slope for slope in slopes if slope.cut]
    causes = list(_cuts(call, ran, incoming, cut)) if cut else []
    mended = {slope.name for slope in cut}
    causes += _lost(call, ran, [slope for slope in slopes if slope.matters and slope.name not in mended])
    return causes


def forward_slopes(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report why jvp cannot be differentiated: HD108."""
    if not call.has_jvp:
        return []
    ran = call.fresh().run()
    tangents = ran.tangents(generator)
    incoming = tuple(
        torch.zeros_like(a) if t is None and isinstance(a, Tensor) else t
        for t, a in zip(tangents, call.args, strict=True)
    )
    slopes = slopes_of(ran, "forward", incoming, generator)
    evidence = [f"jvp cuts the graph of {_spoken(s.name)}" for s in slopes if s.cut and s.name.startswith("saved")]
    evidence += [
        f"jvp reads {s.name}, which was computed in forward and is neither input nor output"
        for s in slopes
        if s.matters
        and not s.cut
        and s.name.startswith("saved")
        and not _is_given(ran, s.tensor)
        and _depends_on_inputs(call, s.name, "forward")
    ]
    # No loss shows this: the tangent depends on the inputs only if another function comes before this one.
    hidden = [f"jvp detaches the tangent of {call.argument(int(s.name.split()[1]))}" for s in slopes if _hides(s)]
    if not evidence and not hidden:
        return []
    location = rule_location(call.function, "jvp")
    return [Cause("HD108", (*evidence, *hidden), forward_differentiated, location, needs_symptom=not hidden)]


def _hides(slope: Slope) -> bool:
    """Whether jvp certainly detaches its tangent, so that no failed comparison is needed as a symptom."""
    if not slope.name.startswith("incoming"):
        return False
    certain = slope.by_autograd == 0 and abs(slope.by_differences) > 100 * slope.noise
    return slope.cut and (certain or not slope.precision.is_low)


def _cuts(call: FunctionCall, ran: ForwardRun, incoming: tuple[Any, ...], cut: list[Slope]) -> list[Cause]:
    """Return causes for cuts in backward; the call that cuts the graph decides the code."""
    location = rule_location(call.function, "backward", "vjp")
    context = ran.context.replaced(lambda name, t: t.clone().requires_grad_(t.is_floating_point()), "backward")
    given = tuple(g.clone().requires_grad_() if isinstance(g, Tensor) else g for g in incoming)
    with torch.enable_grad(), TorchCalls() as trace:
        attempt(call.backward, context, *given)
    foreign, off, detached = trace.of("foreign"), trace.of("no_grad"), trace.of("detach")
    names = ", ".join(_spoken(slope.name) for slope in cut)
    saved = [slope for slope in cut if not slope.name.startswith("incoming")]
    if foreign:
        evidence = (f"backward of {call.name} calls {foreign[0].name}, and the derivative by {names} is lost",)
        return [Cause("HD106", evidence, reverse_differentiated, foreign[0].location or location, needs_symptom=True)]
    if off and saved:
        evidence = (f"backward of {call.name} turns gradients off, and the derivative by {names} is lost",)
        return [Cause("HD104", evidence, reverse_differentiated, off[0].location or location, needs_symptom=True)]
    causes = []
    enters = [g for g in given if isinstance(g, Tensor)]
    on_incoming = [step for step in detached if any(step.reads(g) for g in enters)]
    others = [step for step in detached if step not in on_incoming]
    if len(saved) < len(cut) and (on_incoming or not saved):
        at_fault = [*on_incoming, *off]
        where = at_fault[0].location if at_fault else location
        evidence = (f"backward of {call.name} detaches its incoming gradient",)
        causes.append(Cause("HD116", evidence, reverse_differentiated, where or location, needs_symptom=True))
    if saved:
        spoken = ", ".join(slope.name for slope in saved)
        if others:
            evidence = (f"backward of {call.name} calls {others[0].name}, and the derivative by {spoken} is lost",)
            causes.append(Cause("HD104", evidence, reverse_differentiated, others[0].location, needs_symptom=True))
        elif not on_incoming:
            evidence = (f"what backward of {call.name} calls has a wrong derivative by {spoken}",)
            causes.append(Cause("HD115", evidence, reverse_differentiated, location, needs_symptom=True))
    return causes


def _lost(call: FunctionCall, ran: ForwardRun, read: list[Slope]) -> list[Cause]:
    """Return causes for saved tensors that backward reads and that depend on the inputs outside of the graph."""
    lost = [s for s in read if not s.name.startswith("incoming") and not _is_given(ran, s.tensor)]
    saved = [s for s in lost if s.name.startswith("saved") and _depends_on_inputs(call, s.name, "backward")]
    if not saved:
        return []
    location = rule_location(call.function, "setup_context", "forward")
    aliases = [s for s in saved if any(_same_memory(s.tensor, a) for a in call_tensors(ran))]
    causes = []
    if aliases:
        with TorchCalls() as trace:
            call.fresh().run()
        detached = trace.of("detach")
        if detached:
            evidence = (f"{call.name} saves an input or output detached, as {aliases[0].name}",)
            where = detached[0].location or location
            causes.append(Cause("HD104", evidence, reverse_differentiated, where, needs_symptom=True))
            saved = [s for s in saved if s not in aliases]
    if saved:
        texts = tuple(
            f"backward of {call.name} reads {s.name} of shape {tuple(s.tensor.shape)}, which forward computed and "
            "which is neither input nor output"
            for s in saved
        )
        causes.append(Cause("HD103", texts, reverse_differentiated, location, needs_symptom=True))
    return causes


def call_tensors(ran: ForwardRun) -> list[Tensor]:
    """Return the tensors among inputs and outputs."""
    return [t for t in (*ran.call.args, *ran.outputs) if isinstance(t, Tensor)]


def _is_given(ran: ForwardRun, tensor: Tensor) -> bool:
    given = [t for t in call_tensors(ran) if not any(t is constant for constant in ran.context.constant_outputs)]
    return any(tensor is each for each in given)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _depends_on_inputs(call: FunctionCall, name: str, reading: str) -> bool:
    """Whether a saved tensor changes with the differentiated arguments."""
    change = max(1e-3, 4 * call.eps)
    moved = {i: call.args[i] * (1 + change) + change for i in call.moves()}
    ends = []
    for each in (call.fresh(), call.fresh().at(moved)):
        ran = attempt(each.run)
        if isinstance(ran, Failure):
            return True
        ran.context.reading = reading
        ends.append(ran.context.tensors().get(name))
    return ends[0] is None or ends[1] is None or ends[0].shape != ends[1].shape or not torch.equal(ends[0], ends[1])


def _spoken(name: str) -> str:
    return "the incoming gradient" if name.startswith("incoming") else name
