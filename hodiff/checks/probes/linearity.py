"""Probes of rules that are not linear, or wrong if one argument alone is differentiated, and of what backward returns.

Their defects are HD201 to HD204, HD501, and some of HD101 (gradients), HD102 (tangents) and HD408.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, Explains, by_forward, by_reverse, no_entry
from hodiff.checks.probes.first_order import tolerance_of
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall, cloned
from hodiff.checks.probes.rule_distances import gap_of, rounding_of
from hodiff.checks.source_lines import mentions, rule_location


def lone_tangents(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Push one tangent at a time; check the shapes, and the sum against all tangents together."""
    places = call.moves()
    if len(places) < 2 or not call.has_jvp:
        return []
    whole = call.fresh().run()
    tangents = whole.tangents(generator)
    with torch.no_grad():
        together = whole.push(cloned(tangents))
    alone: dict[int, Any] = {i: attempt(_pushed_alone, call, tangents, i) for i in places}
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


def _pushed_alone(call: FunctionCall, tangents: tuple[Any, ...], only: int) -> tuple[Any, ...]:
    """Push one tangent in a separate run, in which no other argument is differentiated."""
    ran = replace(call.fresh(), moving=tuple(j == only for j in range(len(call.args)))).run()
    with torch.no_grad():
        return ran.push(cloned(t if j == only else None for j, t in enumerate(tangents)))


def _total(parts: list[Any], like: Any) -> Any:
    """Return the sum of the parts that are tensors."""
    there = [part for part in parts if isinstance(part, Tensor)]
    return torch.stack(there).sum(0) if there else torch.zeros_like(like) if isinstance(like, Tensor) else like


def frozen_arguments(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Freeze arguments, and report gradients of other arguments that change."""
    places = call.moves()
    if len(places) < 2:
        return []
    whole = call.fresh().run().gradients()
    evidence: dict[int, str] = {}
    for needed in _subsets(places):
        alone = replace(call.fresh(), moving=tuple(j in needed for j in range(len(call.args))))
        part = attempt(lambda alone=alone: alone.run().gradients())
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


def _of(gradients: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    return (gradients[i] if i < len(gradients) else None,)


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
