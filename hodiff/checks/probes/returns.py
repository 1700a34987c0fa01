"""Probes of backward's results: number, shapes and arguments of gradients: HD201 to HD204, HD501."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, by_reverse, no_entry
from hodiff.checks.probes.function_calls import FunctionCall
from hodiff.checks.source_lines import rule_location


def returned_gradients(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Compare the number, types and shapes of the gradients with those of the arguments."""
    ran = call.fresh().run()
    with torch.no_grad():
        gradients = ran.pull(ran.cotangents(generator))
    location = rule_location(call.function, "backward", "vjp")

    def cause(code: str, *evidence: str) -> Cause:
        return Cause(code, evidence, by_reverse, location)

    causes = []
    count = len(call.args)
    if len(gradients) < count or any(g is not None for g in gradients[count:]):
        text = f"backward of {call.name} returns {len(gradients)} values for {count} arguments of forward"
        causes.append(cause("HD203", text))
    for i, gradient in enumerate(gradients[:count]):
        argument = call.args[i]
        if not isinstance(gradient, Tensor):
            continue
        if not isinstance(argument, Tensor):
            text = f"backward of {call.name} returns a tensor for {call.argument(i)}, which is {argument!r:.40}"
            causes.append(cause("HD204", text))
        elif call.moving[i] and gradient.shape != argument.shape:
            text = (
                f"backward of {call.name} returns shape {tuple(gradient.shape)} for {call.argument(i)} of shape "
                f"{tuple(argument.shape)}"
            )
            reducible = not isinstance(attempt(gradient.sum_to_size, argument.shape), Failure)
            wider = gradient.numel() > argument.numel()
            causes.append(cause("HD202" if reducible and wider else "HD201", text))
    return causes


def unneeded_gradients(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Request one gradient at a time, and report the other gradients that backward computes."""
    places = call.moves()
    extra: dict[int, int] = {}
    raised = ""
    for i in places if len(places) > 1 else ():
        alone = replace(call.fresh(), moving=tuple(j == i for j in range(len(call.args))))
        ran = alone.run()
        incoming = ran.cotangents(generator)
        with torch.no_grad():
            gradients: Any = attempt(ran.pull, incoming)
        if isinstance(gradients, Failure):
            raised = raised or f"backward of {call.name} where only {call.argument(i)} needs one: {gradients.message}"
            continue
        for j in places:
            if j != i and j < len(gradients) and _is_work(gradients[j], incoming):
                extra.setdefault(j, i)
    location = rule_location(call.function, "backward", "vjp")
    works = call.fresh().run()
    with torch.no_grad():
        whole: Any = attempt(works.pull, works.cotangents(generator)) if raised else None
    if raised and not isinstance(whole, Failure):
        return [Cause("HD408", (raised,), no_entry, location)]
    if not extra:
        return []
    evidence = tuple(
        f"backward of {call.name} computes the gradient of {call.argument(j)} when only {call.argument(i)} needs one"
        for j, i in extra.items()
    )
    return [Cause("HD501", evidence, no_entry, location)]


def _is_work(gradient: Any, incoming: tuple[Any, ...]) -> bool:
    """Whether the gradient is a computed tensor; the incoming gradient, or a view of it, costs nothing."""
    if not isinstance(gradient, Tensor):
        return False
    start = gradient.untyped_storage().data_ptr()
    return not any(isinstance(g, Tensor) and g.untyped_storage().data_ptr() == start for g in incoming)
