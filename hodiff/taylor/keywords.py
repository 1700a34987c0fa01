"""Keyword arguments of calls of torch, converted to the arguments that rules take."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from hodiff.corrections.mechanism.argument_forms import NUMPY_NAMES
from hodiff.torch_internals.compilers.dynamo import at_trace_time
from hodiff.torch_internals.operators import signatures_of

# Names to pass as further positional arguments, and pairs of names: of the call, and of the rule.
Plan = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


def in_rules_form(
    func: Any, rule: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass keyword arguments by the rule's names; by position if the rule takes any arguments."""
    plan = _traced_plan if torch.compiler.is_compiling() else _plan
    positional, renamed = plan(func, rule, len(args), tuple(kwargs))
    return (*args, *[kwargs[name] for name in positional]), {own: kwargs[name] for name, own in renamed}


@cache
def _plan(func: Any, rule: Any, count: int, given: tuple[str, ...]) -> Plan:
    parameters = list(inspect.signature(rule).parameters.values())[2:]
    own = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    keywords = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    for positional, by_name in signatures_of(func):
        names = {_torchs_name(name, (*positional, *by_name)): name for name in given if name != "out"}
        if not all(name in positional[count:] or name in by_name for name in names):
            continue
        # The rule's names for positional arguments, by place, unless the rule has torch's name.
        places = dict(zip(positional, own, strict=False))
        new = {name: name if name in keywords else places.get(name) for name in positional}
        following: list[str] = []
        for name in positional[count:]:
            fits = (
                new[name] == places.get(name) if name in places else takes_any and name not in keywords | _NEVER_FIRST
            )
            if name not in names or not fits:
                break
            following.append(name)
        renamed = [(names[name], new.get(name) or name) for name in names if name not in following]
        return tuple(names[name] for name in following), tuple(renamed)
    return (), tuple((name, name) for name in given)


# Options that torch's methods take only by name, though schemas have them among positional arguments.
_NEVER_FIRST = frozenset({"device", "dtype", "layout", "memory_format", "non_blocking", "copy", "pin_memory"})


def _torchs_name(name: str, names: tuple[str, ...]) -> str:
    if name in names:
        return name
    return "input" if name == "self" and "input" in names else NUMPY_NAMES.get(name, name)


@at_trace_time
def _traced_plan(func: Any, rule: Any, count: int, given: tuple[str, ...]) -> Plan:
    return _plan(func, rule, count, given)
