"""Binding of calls to positional arguments, which are split into differentiated and static ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from hodiff.common.options import is_int
from hodiff.errors import InputError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """Binds a function's arguments; work that depends on the signature alone is done once.

    Attributes:
        name: Name of the function in messages.
        static: Positions of the arguments that are not differentiated, ascending.
        exact: Number of positional arguments that need no binding, or -1 if the number may vary.
    """

    def __init__(self, f: Callable[..., Any], nondiff_argnums: int | Sequence[int], decorator: str):
        self.name = getattr(f, "__name__", type(f).__name__)
        self.static = _argnums(nondiff_argnums, decorator)
        self._signature = _signature(f)
        parameters = list(self._signature.parameters.values()) if self._signature else []
        variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        self.exact = -1 if variadic or self._signature is None else len(parameters)
        for parameter in parameters:
            if parameter.kind in {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
                raise InputError(
                    f"{decorator}: {self.name}: expected parameters with positions, got {parameter} by keyword only; "
                    "rules take positional arguments, so give it a position."
                )
        if self.static and self.exact >= 0 and self.static[-1] >= self.exact:
            raise InputError(
                f"{decorator}: nondiff_argnums: expected positions below {self.exact}, the number of parameters of "
                f"{self.name}, got {self.static[-1]}."
            )

    def positional(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments by position, with defaults; raise if they do not fit the signature."""
        if self._signature is None:
            if keywords:
                raise InputError(
                    f"{self.name}: expected positional arguments, got {', '.join(keywords)} by keyword; the function "
                    "has no Python signature, so wrap it in one that names its parameters."
                )
            return arguments
        try:
            bound = self._signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise InputError(f"{self.name}: {error}.") from None
        bound.apply_defaults()
        return bound.args

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split arguments into static and differentiated ones."""
        static = tuple(arguments[i] for i in self.static)
        return static, tuple(each for i, each in enumerate(arguments) if i not in self.static)

    def differentiated_name(self, position: int) -> str:
        """Name of the argument at a position among the differentiated arguments."""
        names = list(self._signature.parameters) if self._signature else []
        kept = [name for i, name in enumerate(names) if i not in self.static]
        return kept[position] if position < len(kept) else f"argument {position}"

    def merge(self, static: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Merge static and differentiated arguments; the inverse of `split`."""
        merged = list(others)
        for position, each in zip(self.static, static, strict=True):
            merged.insert(position, each)
        return merged


def parameter_count(f: Callable[..., Any]) -> int | None:
    """Number of required positional parameters, or None if the signature is unknown."""
    signature = _signature(f)
    if signature is None:
        return None
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in signature.parameters.values())


def parameter_names(f: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters, in order; empty if the signature is unknown."""
    signature = _signature(f)
    return [] if signature is None else [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]


def _signature(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):
        return None


def _argnums(argnums: int | Sequence[int], decorator: str) -> tuple[int, ...]:
    given = tuple(argnums) if hasattr(argnums, "__iter__") else (argnums,)
    for each in given:
        if not is_int(each) or each < 0:
            raise InputError(f"{decorator}: nondiff_argnums: expected non-negative ints, got {argnums!r}.")
    return tuple(sorted(set(given)))
