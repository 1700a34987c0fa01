"""Probe of factors of lower precision in rules of float64: some of HD306."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, Explains, by_forward, by_reverse, every_entry
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall
from hodiff.checks.probes.numbers_inside import numbers_inside
from hodiff.checks.report.data import Entry
from hodiff.checks.source_lines import rule_location

# Largest error that rounding a factor to float32 causes; a larger error has another cause.
_LARGEST = 1e-5

_RULES: tuple[tuple[str, Callable[[ForwardRun], Any], Explains], ...] = (
    ("forward", lambda ran: ran.call.fresh().run(), every_entry),
    ("backward", lambda ran: ran.pull(ran.cotangents(torch.Generator().manual_seed(0))), by_reverse),
    ("jvp", lambda ran: ran.push(ran.tangents(torch.Generator().manual_seed(0))), by_forward),
)


def narrow_factors(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report rules that compute with numbers in less than float64, if derivatives are off by their rounding."""
    if not all(a.dtype == torch.float64 for i, a in enumerate(call.args) if call.moving[i]):
        return []
    causes = []
    for name, rule, follows in _RULES:
        if name == "jvp" and not call.has_jvp:
            continue
        ran = call.fresh().run()
        seen = attempt(numbers_inside, lambda rule=rule, ran=ran: rule(ran))
        if isinstance(seen, Failure) or not seen.rounded:
            continue

        def explains(entry: Entry, follows: Explains = follows) -> bool:
            return follows(entry) and entry.error is not None and entry.error < _LARGEST

        evidence = (f"{name} of {call.name} computes with numbers in less than float64",)
        causes.append(Cause("HD306", evidence, explains, rule_location(call.function, name, "vjp"), needs_symptom=True))
    return causes
