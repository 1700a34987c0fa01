"""Conversion of call arguments to the form that a rule takes.

Rules have the parameters that torch documents. torch also accepts NumPy's names for some parameters, and tensors or
NumPy scalars as numbers.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
from typing import Any

import torch.nn.functional as F

# NumPy's names of arguments, which torch's compiled functions accept besides torch's names.
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "a": "input", "x": "input", "x1": "input", "x2": "other"}
# Argument names of functions that share a rule, and the rule's names for them.
_SHARED = {"input": "A", "other": "B", "input2": "tau", "input3": "other", "train": "training"}
# Conversion of an argument, by the annotation of its parameter.
_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": operator.index, "float": float, "bool": bool}

# Positional and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def weight_of_l1_loss() -> Any:
    """Return the weight of the `l1_loss` that makes this call: torch passes modes its other arguments only."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python's manual documents it
    for _ in range(10):
        if frame is None:
            return None
        if frame.f_code is F.l1_loss.__code__:
            return frame.f_locals["weight"]
        frame = frame.f_back
    return None


class Parameters:
    """Parameters of a rule.

    Args:
        rule: The rule.

    Attributes:
        names: Parameters that can be passed by name.
    """

    def __init__(self, rule: Callable[..., Any]):
        self.signature = _signature(rule)
        self.names = frozenset(
            each.name
            for each in self.signature.parameters.values()
            if each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL, each.VAR_KEYWORD)
        )

    def name(self, given: str) -> str:
        """Return the rule's name for an argument of a compiled function."""
        if given in self.names:
            return given
        name = NUMPY_NAMES.get(given, given)
        shared = _SHARED.get(name, name)
        return shared if name not in self.names and shared in self.names else name

    def renamed(self, function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments by the rule's names, without an `out` that is None."""
        # A function written in Python accepts its own names only.
        name = str if isinstance(function, FunctionType) else self.name
        return {
            name(given): value
            for given, value in kwargs.items()
            if given != "out" or value is not None or "out" in self.names
        }

    def with_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Convert tensors and NumPy scalars to Python numbers where the rule takes them; None if nothing changes."""
        # Raises TypeError if the arguments do not fit the signature of the rule.
        bound = self.signature.bind(*args, **kwargs)
        changed = False
        for name, value in bound.arguments.items():
            number = _as_number(value, self.signature.parameters[name].annotation)
            changed = changed or number is not value
            bound.arguments[name] = number
        return (bound.args, bound.kwargs) if changed else None


def _signature(rule: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a rule; any arguments fit if Python knows none."""
    try:
        return inspect.signature(rule)
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def _as_number(value: Any, annotation: Any) -> Any:
    """Convert a value to a Python number if the annotation is a number; return other values unchanged."""
    if not isinstance(annotation, str):
        return value
    kind, _, _ = annotation.partition(" | ")
    if kind == "Sequence[int]" and isinstance(value, Iterable) and not isinstance(value, str):
        numbers = [_as_number(each, "int") for each in value]
        return value if all(new is old for new, old in zip(numbers, value, strict=True)) else numbers
    if kind not in _NUMBERS or value is None or type(value).__name__ == kind:
        return value
    if getattr(value, "ndim", None) == 0:  # a tensor, or a scalar of NumPy
        # Neither torch nor the rule differentiates by such a number, so it stays a tensor.
        return value if getattr(value, "requires_grad", False) else _NUMBERS[kind](value.item())
    return float(value) if kind == "float" and isinstance(value, int) else value
