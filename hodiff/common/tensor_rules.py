"""Tensors with rules for any function that receives them, such as lengths, whose squares are smooth at 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hodiff.torch_internals.interception import rule_mode

# Tensors by their id, and their rule.
TENSOR_RULES: list[tuple[Mapping[int, Any], Callable[..., Any]]] = []


def register_for_tensors(tensors: Mapping[int, Any], rule: Callable[..., Any]) -> None:
    """Register a rule for eager calls of torch's and hodiff's functions, which runs before the function's own rule.

    Args:
        tensors: The tensors that need the rule, by their id; while it is empty, the rule is not called.
        rule: Takes the function, the positional and keyword arguments, and the mode, and returns the value of the call;
            or None if the call needs only the function's own rule.
    """
    TENSOR_RULES.append((tensors, rule))


def by_tensor_rule(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the value of a call of one of hodiff's own functions by the rule of a tensor among the arguments.

    Without such a rule, or if no corrections are active, return None.
    """
    for tensors, rule in TENSOR_RULES:
        if tensors and (mode := rule_mode()) is not None:
            result = rule(function, args, kwargs, mode)
            if result is not None:
                return result
    return None
