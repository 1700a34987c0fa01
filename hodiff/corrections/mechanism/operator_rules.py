"""Registration of rules for operators (`torch.ops.aten`), from the rules of the torch functions that they compute."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED, Declined
from hodiff.corrections.mechanism.registry import CORRECTIONS, Correction, register
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode, tangents_are_on
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.operators import (
    OpOverload,
    builtins_named,
    names_of,
    operator_named,
    overloads_of,
    places_of,
)

Rule = Callable[..., Any]


def rule_of(function: Callable[..., Any]) -> Rule:
    """Return a rule that looks up the current rule of a torch function at each call."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        entry = CORRECTIONS.get(function)
        return UNNEEDED if entry is None else entry.rule(*args, **kwargs)

    return rule


# Function whose table entry the operators share, names in `torch.ops.aten`, and the rule of the operators.
_NAMED: list[tuple[Callable[..., Any], tuple[str, ...], Rule]] = []


def calls(function: Callable[..., Any], *names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that names the operators of a rule, which share the table entry of a function."""

    def enter(rule: Rule) -> Rule:
        _NAMED.append((function, names, rule))
        return rule

    return enter


def enter_operators() -> None:
    """Register a rule for each operator of a function that has a rule, with the same table entry.

    Call it after all functions have their rules.
    """
    for function, entry in list(CORRECTIONS.items()):
        # A function written in Python has other arguments than an operator of its name.
        if entry.kind != "slow" and not isinstance(function, (FunctionType, OpOverload)):
            _enter(entry, function.__name__.removeprefix("aten."), rule_of(function))
    for function, names, rule in _NAMED:
        if function in CORRECTIONS:  # a later torch may need no rule
            for name in names:
                _enter(CORRECTIONS[function], name, rule)


def _enter(entry: Correction, name: str, rule: Rule) -> None:
    """Register a rule for all operators of a name in this torch, and for equivalent compiled functions."""
    packet = operator_named(name)
    if packet is None:
        return
    overloads = overloads_of(packet)
    without = [each for each in (packet, *overloads, *builtins_named(name)) if each not in CORRECTIONS]
    if not without:
        return
    register(
        *without,
        reason=entry.reason,
        kind=entry.kind,
        routes=entry.routes,
        reference=entry.reference,
        name=entry.name,
        mended=entry.mended,
    )(_by_position(rule, overloads))


def _by_position(rule: Rule, overloads: Sequence[Any]) -> Rule:
    """Return a rule that receives the operator's positional parameters by position, whatever their names."""
    places = [places_of(each) for each in overloads]

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _is_recorded():
            return UNNEEDED
        if kwargs:
            args, kwargs = _placed(places, args, kwargs)
        return rule(*args, **kwargs)

    # Parameters that the mode may pass by name.
    names = dict.fromkeys(name for each in overloads for name in names_of(each))
    parameter = inspect.Parameter
    run.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        parameter("args", parameter.VAR_POSITIONAL),
        *[parameter(name, parameter.KEYWORD_ONLY, default=None) for name in names],
    ])
    return run


def _is_recorded() -> bool:
    """Whether the computation may be differentiated, unlike the kernels that a Function calls."""
    return torch.is_grad_enabled() or in_transform() or (in_forward_mode() and tangents_are_on())


def _placed(
    overloads: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move keyword arguments to their positions in the first overload that fits, with defaults in between."""
    for places in overloads:
        names = list(places)
        end = max((names.index(name) + 1 for name in kwargs if name in places), default=0)
        between = names[len(args) : end]
        if all(name in kwargs or places[name] is not ... for name in between):
            by_name = {name: value for name, value in kwargs.items() if name not in between}
            return (*args, *[kwargs.get(name, places[name]) for name in between]), by_name
    return args, kwargs


def with_others(value: Any, operator: str, *args: Any, **kwargs: Any) -> Any:
    """Return a rule's value with the other results of the operator, which are constants."""
    if isinstance(value, Declined):
        return value
    positional = [_constant(each) for each in args]
    by_name = {name: _constant(each) for name, each in kwargs.items()}
    return value, *operator_named(operator)(*positional, **by_name)[1:]


def _constant(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
