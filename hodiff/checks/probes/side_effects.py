"""Probes of in-place writes, attributes of ctx and uninitialised memory: HD301 to HD304, HD308."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic as _deterministic

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, Explains, every_entry, no_entry, of_second_order
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall, rules_of
from hodiff.checks.probes.torch_calls import TorchCalls
from hodiff.checks.source_lines import mentions, rule_location
from hodiff.common.complex_numbers import equal_with_nan
from hodiff.torch_internals.tensors import version_of

# The stubs of torch.utils.deterministic lack this setting.
_MEMORY: Any = _deterministic


def in_place_writes(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report rules that write into arguments or saved tensors."""
    causes = []
    fresh = call.fresh()
    before = _copies(fresh.args)
    with TorchCalls() as trace:
        ran = fresh.run()
    marked = [t for t in ran.context.dirty if isinstance(t, Tensor)]
    for i, (argument, copy) in enumerate(zip(fresh.args, before, strict=True)):
        if _changed(argument, copy) and not any(argument is t for t in marked):
            where = _line(trace, [argument]) or rule_location(call.function, "forward")
            evidence = (f"forward of {call.name} changes {call.argument(i)}",)
            causes.append(Cause("HD303", evidence, every_entry, where))
    for rule, _, explains in rules_of(call)[1:]:
        found = attempt(_written, call, rule, explains, generator)
        causes += [] if isinstance(found, Failure) else found
    return causes


def _written(call: FunctionCall, rule: str, explains: Explains, generator: torch.Generator) -> list[Cause]:
    ran = call.fresh().run()
    incoming = ran.cotangents(generator) if rule == "backward" else ran.tangents(generator)
    ran.context.reading = "backward" if rule == "backward" else "forward"
    saved = ran.context.tensors()
    copies = {name: (t.clone(), version_of(t)) for name, t in saved.items()}
    given = _copies(incoming)
    with torch.no_grad(), TorchCalls() as trace:
        attempt(ran.pull if rule == "backward" else ran.push, incoming)
    causes = []
    location = rule_location(call.function, rule)
    kind = "incoming gradient" if rule == "backward" else "tangent"
    changed = [g for g, copy in zip(incoming, given, strict=True) if _changed(g, copy)]
    # In forward mode, torch requires an in-place function to write into its tangent, too.
    if changed and not (rule == "jvp" and ran.context.dirty):
        evidence = (f"{rule} of {call.name} writes into its {kind}",)
        causes.append(Cause("HD301", evidence, explains, _line(trace, changed) or location))
    names = [name for name, t in saved.items() if _changed(t, copies[name])]
    if names:
        evidence = (f"{rule} of {call.name} writes into {', '.join(names)}",)
        where = _line(trace, [saved[name] for name in names]) or location
        causes.append(Cause("HD302", evidence, explains, where))
    return causes


def tensors_on_context(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report tensors that are kept as attributes of ctx."""
    ran = call.fresh().run()
    ran.context.reading = "backward"
    names = [name for name in ran.context.tensors() if name.startswith("ctx.")]
    if not names:
        return []
    rule = call.function.forward if call.takes_context else call.function.setup_context
    attribute = names[0].removeprefix("ctx.").split("[")[0]
    where = mentions(rule, attribute) or rule_location(call.function, "setup_context", "forward")
    evidence = (f"{call.name} keeps {', '.join(names)}",)
    return [Cause("HD304", evidence, of_second_order if _differentiable(ran, names) else no_entry, where)]


def uninitialised_memory(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Fill uninitialised memory with NaN, and report the rules that return it."""
    causes = []
    for name, rule, explains in rules_of(call):

        def run(rule: Callable[[ForwardRun], tuple[Any, ...]] = rule) -> tuple[Any, ...]:
            with torch.no_grad():
                return rule(call.fresh().run())

        with _poisoned():
            poisoned: Any = attempt(run)
        # NaN without poison comes from the formula.
        if isinstance(poisoned, Failure) or not any(_has_nan(y) for y in poisoned):
            continue
        plain: Any = attempt(run)
        if isinstance(plain, Failure) or not any(map(_has_nan, plain)):
            location = mentions(getattr(call.function, name), "empty", "empty_like", "new_empty", "empty_strided")
            where = location or rule_location(call.function, name)
            causes.append(
                Cause("HD308", (f"{name} of {call.name} returns memory that it never wrote",), explains, where)
            )
            if name == "forward":
                break
    return causes


def _differentiable(ran: ForwardRun, names: list[str]) -> bool:
    tensors = ran.context.tensors()
    return any(tensors[name].is_floating_point() for name in names)


def _copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((v.clone(), version_of(v)) if isinstance(v, Tensor) else v for v in values)


def _changed(now: Any, before: Any) -> bool:
    if not isinstance(now, Tensor):
        return False
    return version_of(now) != before[1] or not _equal(now, before[0])


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor))
    return a.shape == b.shape and equal_with_nan(a, b)


def _has_nan(y: Any) -> bool:
    return isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex()) and bool(y.isnan().any())


def _line(trace: TorchCalls, tensors: list[Any]) -> str:
    steps = [step for step in trace.of("in place") if step.tensors and any(step.tensors[0] is t for t in tensors)]
    return steps[0].location if steps else ""


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN; restore torch's settings afterwards."""
    mode, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = _MEMORY.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.use_deterministic_algorithms(True, warn_only=True)
            _MEMORY.fill_uninitialized_memory = True
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn)
        _MEMORY.fill_uninitialized_memory = fill
