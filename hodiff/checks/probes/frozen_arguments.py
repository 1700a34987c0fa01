"""Probe of gradients that are lost if another argument needs none: some of HD101."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, by_reverse
from hodiff.checks.probes.function_calls import FunctionCall
from hodiff.checks.probes.numbers import gap_of, rounding_of
from hodiff.checks.source_lines import mentions, rule_location


def frozen_arguments(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Freeze arguments, and report gradients of other arguments that change."""
    places = call.moves()
    if len(places) < 2:
        return []
    whole = _gradients(call)
    evidence: dict[int, str] = {}
    for needed in _subsets(places):
        part = attempt(_gradients, replace(call, moving=tuple(j in needed for j in range(len(call.args)))))
        if isinstance(part, Failure):
            continue
        for i in needed:
            if max(len(whole), len(part)) > i and gap_of(_of(whole, i), _of(part, i)) > rounding_of(call.eps):
                frozen = ", ".join(call.argument(j) for j in places if j not in needed)
                evidence.setdefault(
                    i, f"the gradient of {call.argument(i)} in {call.name} is lost where {frozen} needs none"
                )
    location = mentions(call.backward, "needs_input_grad") or rule_location(call.function, "backward", "vjp")
    return [Cause("HD101", tuple(evidence.values()), by_reverse, location)] if evidence else []


def _subsets(places: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield each place alone, then all places but one."""
    yield from ((i,) for i in places)
    if len(places) > 2:
        yield from (tuple(j for j in places if j != i) for i in places)


def _gradients(call: FunctionCall) -> tuple[Any, ...]:
    ran = call.fresh().run()
    with torch.no_grad():
        return ran.pull(ran.cotangents(torch.Generator().manual_seed(0)))


def _of(gradients: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    return (gradients[i] if i < len(gradients) else None,)
