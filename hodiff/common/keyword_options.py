"""Keyword options shared by several classes, declared once as a `TypedDict` and shown in each signature.

An entry is `name: Annotated[type, Default(value, "What it does."), validator]`: the default with its explanation for
`help`, and a validator of the caller, the name and the value, such as those of `hodiff.common.options`. A function that
passes the options on takes `**options: Unpack[...]`, which type checkers and editors understand.
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
# The entry `**options` of a docstring, with its further lines.
_ENTRY = re.compile(r"^( *)\*\*options:.*\n(?:\1 +\S.*\n)*", re.MULTILINE)
# Takes the caller, the option's name, and its value.
Validator = Callable[[str, str, Any], None]


@dataclass(frozen=True)
class Default:
    """The default of an option, and its explanation."""

    value: Any
    explanation: str


def with_defaults(
    owner: Callable[..., Any], options: type, given: Mapping[str, Any], *, caller: str = ""
) -> dict[str, Any]:
    """Return all options, validated or by default; a TypeError suggests the nearest name for an unknown one.

    Args:
        owner: The class or function that takes the options.
        options: Declaration of the options.
        given: The options that were given.
        caller: Name of the owner in validators' messages, if that is not its own name.

    Returns:
        The values by name.
    """
    parameters, validators = _declared(options)
    _require_known(owner, given, parameters)
    for name, value in given.items():
        validators[name](caller or owner.__name__, name, value)
    return {name: given.get(name, parameter.default) for name, parameter in parameters.items()}


def require_options(caller: Callable[..., Any], takes: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise a TypeError in the caller's name for options that `takes`, to which it passes them, does not have."""
    if given:
        _require_known(caller, given, _keywords(takes), (*_keywords(caller), *_keywords(takes)))


def _require_known(
    owner: Callable[..., Any], given: Iterable[str], taken: Iterable[str], known: Iterable[str] | None = None
) -> None:
    """Raise a TypeError for an unknown option, with the nearest known name, or with all names."""
    for name in given:
        if name not in taken:
            names = list(_keywords(owner) if known is None else known)
            near = difflib.get_close_matches(name, names, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}."
            raise TypeError(f"{owner.__name__}() got an unexpected keyword argument {name!r}; {remedy}")


@functools.cache
def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the keyword-only parameters of a function."""
    return tuple(
        each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
    )


def shows(options: type) -> Callable[[F], F]:
    """Return a decorator that shows options with their defaults in the signature of a function with `**options`."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        # mypy does not know that functions may have a `__signature__`.
        function.__signature__ = signature.replace(parameters=[*own, *_declared(options)[0].values()])  # type: ignore[attr-defined]
        return function

    return decorate


def explains(options: type) -> Callable[[F], F]:
    """Return a decorator that replaces the docstring entry `**options` by explanations of the options."""

    def decorate(owner: F) -> F:
        # None where Python leaves docstrings out.
        if owner.__doc__ is not None:
            owner.__doc__ = _ENTRY.sub(lambda found: _explanations(options, found[1]), owner.__doc__)
        return owner

    return decorate


def _explanations(options: type, indent: str) -> str:
    """Return the docstring entries of the options, at an indentation."""
    wrapper = textwrap.TextWrapper(120, indent, f"{indent}    ", break_long_words=False, break_on_hyphens=False)
    hints = get_type_hints(options, include_extras=True)
    entries = [f"{name}: {hint.__metadata__[0].explanation}" for name, hint in hints.items()]
    return "".join(f"{wrapper.fill(each)}\n" for each in entries)


# A dict, as dynamo warns about caches of functools; `shows` fills it when a class is defined.
_DECLARATIONS: dict[type, tuple[dict[str, inspect.Parameter], dict[str, Validator]]] = {}


def _declared(options: type) -> tuple[dict[str, inspect.Parameter], dict[str, Validator]]:
    """Return parameters and validators, each by the option's name."""
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
