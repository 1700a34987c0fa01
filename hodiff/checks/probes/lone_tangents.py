"""Probe of tangents that are wrong if only one argument has a tangent: some of HD102 and HD408."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, by_forward
from hodiff.checks.probes.first_order import tolerance_of
from hodiff.checks.probes.function_calls import FunctionCall
from hodiff.checks.probes.numbers import gap_of
from hodiff.checks.source_lines import rule_location


def lone_tangents(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Push one tangent at a time; check the shapes, and the sum against all tangents together."""
    places = call.moves()
    if len(places) < 2 or not call.has_jvp:
        return []
    whole = call.fresh().run()
    tangents = whole.tangents(generator)
    with torch.no_grad():
        together = whole.push(_copies(tangents))
    alone: dict[int, Any] = {i: attempt(_pushed, call, tangents, i) for i in places}
    raised = (
        f"jvp of {call.name} where only {call.argument(i)} has a tangent: {each.message}"
        for i, each in alone.items()
        if isinstance(each, Failure)
    )
    counted = (
        f"jvp of {call.name} returns {len(each)} tangents where only {call.argument(i)} has one, and {len(together)} "
        "where all arguments have"
        for i, each in alone.items()
        if not isinstance(each, Failure) and len(each) != len(together)
    )
    shaped = (
        f"jvp of {call.name} returns shape {tuple(dy.shape)} for an output of shape {tuple(y.shape)} where only "
        f"{call.argument(i)} has a tangent"
        for i, each in alone.items()
        if not isinstance(each, Failure)
        for dy, y in zip(each, whole.outputs, strict=False)
        if isinstance(dy, Tensor) and dy.shape != y.shape
    )
    location = rule_location(call.function, "jvp")
    if evidence := (*raised, *counted, *shaped):
        return [Cause("HD408", evidence, by_forward, location)]
    total = tuple(_total([each[k] for each in alone.values()], y) for k, y in enumerate(together))
    # A rule may use an iterative solver, with its tolerance.
    if gap_of(together, total) <= tolerance_of(call):
        return []
    evidence = (f"tangents of {call.name} one at a time do not add up to its tangent of all of them",)
    return [Cause("HD102", evidence, by_forward, location)]


def _pushed(call: FunctionCall, tangents: tuple[Any, ...], only: int) -> tuple[Any, ...]:
    """Push one tangent in a separate run, in which no other argument is differentiated."""
    ran = replace(call.fresh(), moving=tuple(j == only for j in range(len(call.args)))).run()
    with torch.no_grad():
        return ran.push(_copies(t if j == only else None for j, t in enumerate(tangents)))


def _copies(tangents: Any) -> tuple[Any, ...]:
    return tuple(t.clone() if isinstance(t, Tensor) else t for t in tangents)


def _total(parts: list[Any], like: Any) -> Any:
    """Return the sum of the parts that are tensors."""
    there = [part for part in parts if isinstance(part, Tensor)]
    return torch.stack(there).sum(0) if there else torch.zeros_like(like) if isinstance(like, Tensor) else like
