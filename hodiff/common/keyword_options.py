"""Keyword options that several classes take: declared once as a `TypedDict`, shown in each signature.

An entry carries its default with what `help` says of the option, and a validator, as those of `hodiff.common.options`,
of the caller, the name and the value: an option is validated and explained because it is declared,
`name: Annotated[type, Default(value, "What it does."), validator]`. A function that hands the options on takes
`**options: Unpack[...]`, by which type checkers and editors know them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])
# The entry with its further lines.
_ENTRY = re.compile(r"^( *)\*\*options:.*\n(?:\1 +\S.*\n)*", re.MULTILINE)
# Of the caller, the option's name, and its value.
Validator = Callable[[str, str, Any], None]


@dataclass(frozen=True)
class Default:
    """The default of an option, and what the option does."""

    value: Any
    explanation: str


def with_defaults(
    owner: Callable[..., Any], options: type, given: Mapping[str, Any], *, caller: str = ""
) -> dict[str, Any]:
    """All options by name, validated, or by their defaults; a TypeError names the one nearest to a mistyped one.

    Args:
        owner: The class or function that takes them.
        options: Their declaration.
        given: What was given.
        caller: What validators call the owner, where that is not its name.

    Returns:
        The values.
    """
    parameters, validators = _declared(options)
    _require_known(owner, given, parameters)
    for name, value in given.items():
        validators[name](caller or owner.__name__, name, value)
    return {name: given.get(name, parameter.default) for name, parameter in parameters.items()}


def require_options(caller: Callable[..., Any], takes: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse options that `takes`, to which the caller hands them on, does not have, in the name of the caller."""
    if given:
        _require_known(caller, given, _keywords(takes), (*_keywords(caller), *_keywords(takes)))


def _require_known(
    owner: Callable[..., Any], given: Iterable[str], taken: Iterable[str], known: Iterable[str] | None = None
) -> None:
    """Raise a TypeError for an option that is not taken, with the nearest of the known ones, or all of them."""
    for name in given:
        if name not in taken:
            names = list(_keywords(owner) if known is None else known)
            near = difflib.get_close_matches(name, names, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}."
            raise TypeError(f"{owner.__name__}() got an unexpected keyword argument {name!r}; {remedy}")


@functools.cache
def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options in a signature."""
    return tuple(
        each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
    )


def shows(options: type) -> Callable[[F], F]:
    """Decorate a function that ends in `**options`, so that its signature names them with their defaults."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        # mypy does not know that functions may have one of their own.
        function.__signature__ = signature.replace(parameters=[*own, *_declared(options)[0].values()])  # type: ignore[attr-defined]
        return function

    return decorate


def explains(options: type) -> Callable[[F], F]:
    """Decorate what has an entry `**options` in its docstring, so that this explains each of them in its place."""

    def decorate(owner: F) -> F:
        # None where Python leaves docstrings out.
        if owner.__doc__ is not None:
            owner.__doc__ = _ENTRY.sub(lambda found: _explanations(options, found[1]), owner.__doc__)
        return owner

    return decorate


def _explanations(options: type, indent: str) -> str:
    """The entries of a docstring's arguments, at its indentation."""
    wrapper = textwrap.TextWrapper(120, indent, f"{indent}    ", break_long_words=False, break_on_hyphens=False)
    hints = get_type_hints(options, include_extras=True)
    entries = [f"{name}: {hint.__metadata__[0].explanation}" for name, hint in hints.items()]
    return "".join(f"{wrapper.fill(each)}\n" for each in entries)


# A table, as dynamo warns of caches of functools; `shows` fills it when a class is made.
_DECLARATIONS: dict[type, tuple[dict[str, inspect.Parameter], dict[str, Validator]]] = {}


def _declared(options: type) -> tuple[dict[str, inspect.Parameter], dict[str, Validator]]:
    """Parameters and validators by the option's name."""
    if options in _DECLARATIONS:
        return _DECLARATIONS[options]
    parameters, validators = {}, {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        default, validators[name] = hint.__metadata__
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default.value, annotation=hint.__origin__
        )
    _DECLARATIONS[options] = parameters, validators
    return parameters, validators
