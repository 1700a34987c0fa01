"""Probes of tensors made inside with a fixed dtype or on a fixed device, HD306 and HD307.

Factors of lower precision in rules of float64 are found by their rounding: some of HD306.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hodiff.checks.attempts import Failure, attempt, first_line
from hodiff.checks.probes.cause import Cause, Explains, no_entry
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall, rules_of
from hodiff.checks.probes.numbers_inside import cancels, numbers_inside
from hodiff.checks.probes.torch_calls import TorchCalls, kind_of
from hodiff.checks.report.data import Entry
from hodiff.checks.source_lines import rule_location
from hodiff.torch_internals.wording import Wording, says

# Largest error that rounding a factor to float32 causes; a larger error has another cause.
_LARGEST = 1e-5


def narrow_factors(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report rules that compute with numbers in less than float64, if derivatives are off by their rounding."""
    if not all(a.dtype == torch.float64 for i, a in enumerate(call.args) if call.moving[i]):
        return []
    causes = []
    for name, rule, follows in rules_of(call):
        ran = call.fresh().run()
        again = partial(lambda call: call.fresh().run(), ran.call)
        seen = attempt(numbers_inside, again if name == "forward" else partial(rule, ran))
        if isinstance(seen, Failure) or not seen.rounded:
            continue

        def explains(entry: Entry, follows: Explains = follows) -> bool:
            return follows(entry) and entry.error is not None and entry.error < _LARGEST

        evidence = (f"{name} of {call.name} computes with numbers in less than float64",)
        causes.append(Cause("HD306", evidence, explains, rule_location(call.function, name, "vjp"), needs_symptom=True))
    return causes


# Device that computes no numbers and exists in every build of torch.
_ELSEWHERE = "meta"


def fixed_dtypes(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report rules that return a lower precision than float64, or ignore small changes of the inputs."""
    if not all(a.dtype == torch.float64 for i, a in enumerate(call.args) if call.moving[i]):
        return []
    causes = []
    for name, rule, explains in rules_of(call):
        seen: Any = attempt(_fixed, call, rule)
        if isinstance(seen, str) and seen:
            location = rule_location(call.function, name)
            causes.append(Cause("HD306", (f"{name} of {call.name} {seen}",), explains, location))
            if name == "forward":
                break
    return causes


def _fixed(call: FunctionCall, rule: Callable[[ForwardRun], tuple[Any, ...]]) -> str:
    def at(h: float) -> list[Tensor]:
        moved = {i: call.args[i] * (1 + h) for i in call.moves()}
        with torch.no_grad():
            results = rule(call.fresh().at(moved).run())
        return [y for y in results if isinstance(y, Tensor) and y.is_floating_point() and y.numel()]

    here, far, near = at(0.0), at(1e-5), at(1e-10)
    for k, y in enumerate(here):
        if y.dtype != torch.float64:
            return f"returns {str(y.dtype).removeprefix('torch.')} for float64 inputs"
        visible = 1e-5 * (far[k] - y).abs() > 100 * torch.finfo(y.dtype).eps * y.abs()
        if bool(visible.any()) and not bool((near[k] - y)[visible].any()):
            size = max(
                float(t.abs().max()) for t in (y, *(a for a in call.args if isinstance(a, Tensor) and a.numel()))
            )
            return "" if cancels(lambda: at(0.0), size) else "rounds to a lower precision inside"
    return ""


def fixed_devices(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Run all rules on the meta device, which has shapes and devices but no numbers."""
    fake = _Elsewhere()
    if _enters_extensions(lambda: _all_rules(call, generator)):
        return []

    def forward() -> ForwardRun:
        return call.at({i: fake.put(a) for i, a in enumerate(call.args) if isinstance(a, Tensor)}).run()

    def incoming(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(torch.ones_like(y) if isinstance(y, Tensor) and y.is_floating_point() else None for y in values)

    def tangents(ran: ForwardRun) -> tuple[Any, ...]:
        return tuple(torch.ones_like(a) if m else None for a, m in zip(ran.call.args, call.moving, strict=True))

    rules: dict[str, Callable[[], tuple[Any, ...]]] = {
        "forward": lambda: forward().outputs,
        "backward": lambda: (ran := forward()).pull(incoming(ran.outputs)),
        "jvp": lambda: (ran := forward()).push(tangents(ran)),
    }
    for name, _, _ in rules_of(call):
        seen, where = fake.look(rules[name])
        if seen:
            location = where or rule_location(call.function, name)
            return [Cause("HD307", (f"{name} of {call.name} on another device: {seen}",), no_entry, location)]
    return []


def _all_rules(call: FunctionCall, generator: torch.Generator) -> None:
    ran = call.fresh().run()
    with torch.no_grad():
        attempt(ran.pull, ran.cotangents(generator))
        if call.has_jvp:
            attempt(ran.push, ran.tangents(generator))


def device_of_function(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Cause]:
    """Run a plain function on the meta device; tensors that it closes over count as made inside."""
    fake = _Elsewhere()
    own = tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, args)
    if _enters_extensions(lambda: function(*own)):
        return []
    placed = tree_map(lambda a: fake.put(a) if isinstance(a, Tensor) else a, args)
    seen, where = fake.look(lambda: tuple(tree_leaves(function(*placed))))
    return [Cause("HD307", (f"on another device: {seen}",), no_entry, where)] if seen else []


class _Guard(TorchCalls):
    """Recorder of calls that refuses to read missing memory, and records the tensors that a rule makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def holds_made(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether a tensor among them is on a real device and was made inside."""
        here = [t for t in tensors if t.device.type != _ELSEWHERE]
        return any(t is each for t in here for each in self.made)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind_of(func, args) == "foreign":
            raise NotImplementedError("no memory to point to")
        result = super().__torch_function__(func, types, args, kwargs)
        used = self.steps[-1].tensors
        if isinstance(result, Tensor) and all(any(t is each for each in self.made) for t in used):
            self.made.append(result)
        return result


def _enters_extensions(rule: Callable[[], Any]) -> bool:
    """Whether a real run enters compiled extensions, which might crash on tensors without memory."""
    found = []

    def note(frame: Any, event: str, argument: Any) -> None:
        # Functions made by pybind11 are bound to a capsule.
        if event == "c_call" and type(getattr(argument, "__self__", None)).__name__ == "PyCapsule":
            found.append(str(getattr(argument, "__module__", "")))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        attempt(rule)
    finally:
        sys.setprofile(before)
    return any(not name.startswith("torch") for name in found)


class _Elsewhere:
    """The meta device, and errors of rules there."""

    def put(self, tensor: Any) -> Any:
        """Return a tensor of the same shape and strides on the meta device."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_ELSEWHERE)

    def look(self, rule: Callable[[], tuple[Any, ...]]) -> tuple[str, str]:
        """Run a rule on the meta device; return its error about devices and the line, or empty strings."""
        trace = _Guard()
        try:
            with torch.no_grad(), trace:
                results = rule()
        except Exception as error:
            last = next((step for step in reversed(trace.steps) if step.kind != "no_grad"), None)
            copies = last is not None and last.name in {"copy_", "__setitem__"}
            if not says(error, Wording.OTHER_DEVICE) and not (copies and says(error, Wording.NO_NUMBERS_TO_COPY)):
                return "", ""
            if last is None or not trace.holds_made(last.tensors):
                return "", ""
            return first_line(error), last.location
        wrong = [y for y in results if isinstance(y, Tensor) and y.device.type != _ELSEWHERE]
        return (f"a result on {wrong[0].device}", "") if wrong and trace.made else ("", "")
