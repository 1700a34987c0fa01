"""The forms in which torch takes one call, brought to the one that its rule knows.

Rules have the parameters that torch documents. torch takes NumPy's names for some of them, and numbers that are tensors
or NumPy's scalars.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

# NumPy's names of arguments, which torch's compiled functions take beside its own.
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "a": "input", "x": "input", "x1": "input", "x2": "other"}
# Of functions that share a rule, the names that one of them has, and those of the rule.
_SHARED = {"input": "A", "other": "B", "input2": "tau", "input3": "other"}
# What becomes of an argument, by the annotation of its parameter.
_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": operator.index, "float": float, "bool": bool}

# Positional ones, and those by keyword.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Parameters:
    """What a rule takes.

    Args:
        rule: The rule.

    Attributes:
        names: Those that it takes by name.
    """

    def __init__(self, rule: Callable[..., Any]):
        self.signature = _signature(rule)
        self.names = frozenset(
            each.name
            for each in self.signature.parameters.values()
            if each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL, each.VAR_KEYWORD)
        )

    def name(self, given: str) -> str:
        """What the rule calls an argument of a compiled function."""
        if given in self.names:
            return given
        name = _NUMPY.get(given, given)
        shared = _SHARED.get(name, name)
        return shared if name not in self.names and shared in self.names else name

    def renamed(self, function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by the rule's names, without an `out` that is None."""
        # A function that is written in Python takes its own names alone.
        name = str if isinstance(function, FunctionType) else self.name
        return {
            name(given): value
            for given, value in kwargs.items()
            if given != "out" or value is not None or "out" in self.names
        }

    def with_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments with Python's numbers where others stood for them; None where there are no such.

        Args:
            args: The arguments.
            kwargs: The arguments by keyword.

        Returns:
            Both anew, or None.

        Raises:
            TypeError: If the rule does not take so many arguments, or those names.
        """
        bound = self.signature.bind(*args, **kwargs)
        changed = False
        for name, value in bound.arguments.items():
            number = _as_number(value, self.signature.parameters[name].annotation)
            changed = changed or number is not value
            bound.arguments[name] = number
        return (bound.args, bound.kwargs) if changed else None


def _signature(rule: Callable[..., Any]) -> inspect.Signature:
    """Any arguments where Python cannot say."""
    try:
        return inspect.signature(rule)
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def _as_number(value: Any, annotation: Any) -> Any:
    """A number of Python's own, where the annotation asks for one and the value stands for one."""
    if not isinstance(annotation, str):
        return value
    kind, _, _ = annotation.partition(" | ")
    if kind == "Sequence[int]" and isinstance(value, Iterable) and not isinstance(value, str):
        numbers = [_as_number(each, "int") for each in value]
        return value if all(new is old for new, old in zip(numbers, value, strict=True)) else numbers
    if kind not in _NUMBERS or value is None or type(value).__name__ == kind:
        return value
    if getattr(value, "ndim", None) == 0:  # a tensor, or a scalar of NumPy
        # A derivative by such a number is none of torch's, nor of the rule's.
        return value if getattr(value, "requires_grad", False) else _NUMBERS[kind](value.item())
    return float(value) if kind == "float" and isinstance(value, int) else value
