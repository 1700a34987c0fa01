"""Probe of rules that are not linear in the incoming gradient or tangent: some of HD101 and HD102."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, Explains, by_forward, by_reverse
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall
from hodiff.checks.probes.numbers import gap_of, rounding_of
from hodiff.checks.source_lines import rule_location

# Powers of two, which cause no rounding; 1e-8 to 1e8, as losses are divided by many samples or scaled up.
_SCALES = (-1.0, 2.0**-27, 2.0**-13, 2.0**13, 2.0**27)

Rule = Callable[[ForwardRun, float], tuple[Any, ...]]


def linearity(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Scale incoming gradients and tangents, and report rules whose results do not scale."""
    causes = []
    for name, what, rule, code, explains in _RULES:
        if name == "jvp" and not call.has_jvp:
            continue
        # A rule that raises has its own finding.
        seen = attempt(_not_scaled, call, rule)
        if not isinstance(seen, Failure) and seen:
            evidence = (f"{name} of {call.name} is not linear in its {what}: {seen}",)
            causes.append(Cause(code, evidence, explains, rule_location(call.function, name, "vjp")))
    return causes


def _pulled(ran: ForwardRun, scale: float) -> tuple[Any, ...]:
    return ran.pull(_scaled(ran.cotangents(torch.Generator().manual_seed(0)), scale))


def _pushed(ran: ForwardRun, scale: float) -> tuple[Any, ...]:
    return ran.push(_scaled(ran.tangents(torch.Generator().manual_seed(0)), scale))


_RULES: tuple[tuple[str, str, Rule, str, Explains], ...] = (
    ("backward", "incoming gradient", _pulled, "HD101", by_reverse),
    ("jvp", "tangent", _pushed, "HD102", by_forward),
)


def _not_scaled(call: FunctionCall, rule: Rule) -> str:
    def at(scale: float) -> tuple[Any, ...]:
        with torch.no_grad():
            return _scaled(rule(call.fresh().run(), scale), 1 / scale)

    plain = at(1.0)
    for scale in _SCALES:
        if not _holds(call, scale):
            continue
        gap = gap_of(plain, at(scale))
        if gap > rounding_of(call.eps):
            return f"for one that is {scale:.0e} times as large it is off by {gap:.1e}, relative"
    return ""


def _holds(call: FunctionCall, scale: float) -> bool:
    """Whether the dtypes can hold products of a few numbers of this scale."""
    dtypes = [a.dtype for a in call.args if isinstance(a, Tensor) and a.is_floating_point()]
    return all(torch.finfo(t).tiny ** 0.25 <= abs(scale) <= torch.finfo(t).max ** 0.25 for t in dtypes)


def _scaled(values: tuple[Any, ...], scale: float) -> tuple[Any, ...]:
    return tuple(v * scale if isinstance(v, Tensor) else v for v in values)
