"""Table of Taylor-mode rules: how a series propagates through each torch function, under all names of the function.

Calls of torch pass keyword arguments by torch's names, which are converted to the arguments of the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_testing_overrides

from hodiff.corrections.mechanism.argument_forms import NUMPY_NAMES
from hodiff.errors import InputError
from hodiff.taylor.running import frames
from hodiff.torch_internals.compilers.dynamo import at_trace_time
from hodiff.torch_internals.custom_operators import CustomOpDef, operator_of
from hodiff.torch_internals.operators import signatures_of
from hodiff.torch_operators.operator import IN_PLACE_OPERATORS
from hodiff.torch_operators.table import ALIASES, functions_named

# A rule takes the frame, the torch function that was called, and its arguments. Some arguments are jets or contain
# jets.
Rule = Callable[..., Any]


def name_of(function: Any) -> str:
    """Name of a function, empty where it has none."""
    # Formatted, because dynamo of torch 2.14 does not support methods of the attribute itself.
    return f"{getattr(function, '__name__', '')}"


@dataclass(frozen=True)
class Entry:
    """Entry of a function in the table of rules.

    Attributes:
        name: Name of the rule.
        rule: The rule.
        plain: Out-of-place variant of a function that writes its result to its first argument.
        switch: Position of the parameter `inplace`, if the function has one.
        analytic: Whether the rule also supports complex numbers.
        is_bound: Whether keyword arguments are passed by position, or by the rule's names.
    """

    name: str
    rule: Rule
    plain: Any = None
    switch: int | None = None
    analytic: bool = False
    is_bound: bool = True


# Looked up at every call.
RULES: dict[Any, Entry] = {}


def enter(name: str, rule: Rule, *, analytic: bool = False) -> None:
    """Enter a rule for a torch function, its methods, aliases and in-place variants."""
    for each in (name, *ALIASES.get(name, ())):
        out_of_place = list(functions_named(each))
        for function in out_of_place:
            plain = functions_named(name) if each in IN_PLACE_OPERATORS else iter(())
            RULES[function] = Entry(name, rule, next(plain, None), _place_of_switch(function), analytic)
        if not each.endswith("_"):
            for function in functions_named(each + "_"):
                plain_one = out_of_place[0] if out_of_place else function
                RULES[function] = Entry(name, rule, plain_one, None, analytic)


def _place_of_switch(function: Any) -> int | None:
    """Position of the parameter `inplace` of a Python function, or None."""
    if not isinstance(function, FunctionType):
        return None
    names = list(inspect.signature(function, follow_wrapped=False).parameters)
    return names.index("inplace") if "inplace" in names else None


def rule(*names: str, analytic: bool = False) -> Callable[[Rule], Rule]:
    """Decorator that enters a rule under names, such as "sin", "linalg.inv" or "nn.softplus"."""

    def entered(function: Rule) -> Rule:
        for name in names:
            enter(name, function, analytic=analytic)
        return function

    return entered


analytic_rule = partial(rule, analytic=True)


def register(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    r"""Decorator that registers a Taylor-mode rule for functions.

    Args:
        *functions: A torch function under all of its names, an operator such as `torch.ops.library.name` or one of
            `torch.library.custom_op`, or a `torch.autograd.Function` with `setup_context`.

    Returns:
        The decorator. The rule takes the arguments of the function, some of which are jets, and computes the result
        with torch functions that have rules.

    Raises:
        InputError: If no function is given, one is not callable, or jets cannot intercept its calls.

    Example:
        >>> import torch, hodiff
        >>> @hodiff.taylor.register(torch.special.bessel_j0)
        ... def series_near_zero(x, *, out=None):
        ...     return 1 - x**2 / 4 + x**4 / 64
        >>> one = torch.tensor(1.0)
        >>> hodiff.taylor.jet(torch.special.bessel_j0, (0 * one,), ([one, 0 * one],))[1]
        (tensor(0.), tensor(-0.5000))
        >>> del hodiff.taylor.RULES[torch.special.bessel_j0]
    """
    if not functions or not all(callable(each) for each in functions):
        raise InputError(
            f"register: functions: expected torch functions, got {functions!r}; write @register(torch.sin)."
        )
    if unseen := [each for each in functions if _is_unseen(each)]:
        raise InputError(
            f"register: functions: expected functions of torch, operators or classes of autograd.Functions, got "
            f"{unseen[0]!r}, whose calls do not reach __torch_function__, so the rule would never be used; register "
            "the functions that it calls, or a torch.autograd.Function with its code."
        )

    def entered(own: Rule) -> Rule:
        def follow(frame: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            for each in frames():
                each.has_own_rules = True
            return own(*args, **kwargs)

        for function in functions:
            called = operator_of(function) if isinstance(function, CustomOpDef) else function
            RULES[called] = Entry(str(getattr(function, "__name__", function)), follow, analytic=True, is_bound=False)
        return own

    return entered


def _is_unseen(function: Any) -> bool:
    """Whether calls run without a look at their arguments' `__torch_function__`."""
    if isinstance(function, torch.nn.Module) or function is Tensor.as_subclass:
        return True
    if not isinstance(function, (FunctionType, MethodType)) or hasattr(function, "is_of_hodiff"):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "handle_torch_function" not in getattr(code, "co_names", ()) and function not in get_testing_overrides()


# Methods that torch implements in Python; a compiler cannot look them up in a dictionary.
_WRITTEN_IN_PYTHON = ("__rsub__", "__rdiv__", "__rtruediv__", "__pow__", "__rpow__", "__rmod__", "__rfloordiv__")
_METHODS = [(name, getattr(Tensor, name)) for name in (*_WRITTEN_IN_PYTHON, "norm", "split")]
_OF_METHODS: dict[str, Entry] = {}


def entry_of(function: Any) -> Entry | None:
    """The entry of a function, or of the operator that an overload belongs to."""
    if torch.compiler.is_compiling():
        for name, method in _METHODS:
            if function is method:
                return _OF_METHODS.get(name)
    return RULES.get(function) or RULES.get(getattr(function, "overloadpacket", None))


def keep_methods() -> None:
    """Index the entries of methods by name, once all rules are entered."""
    _OF_METHODS.update((name, RULES[method]) for name, method in _METHODS if method in RULES)


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
