"""The table of torch functions that hodiff has a better rule for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name

from hodiff.common.options import require_choice, require_int
from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.forms import Parameters
from hodiff.corrections.rows import CorrectionTable
from hodiff.corrections.rows import Row as Row
from hodiff.errors import InputError
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.recording import set_recording
from hodiff.torch_internals.compilers.dynamo import at_trace_time, give_zeros_memory, show_to_modes

Rule = TypeVar("Rule", bound=Callable[..., Any])

# What may be amiss with torch's derivatives: silently wrong, not implemented, or right and slow.
KINDS = ("wrong", "missing", "slow")


@dataclass(frozen=True)
class Correction:
    """A rule in place of a torch function.

    Attributes:
        name: The torch function, as users write it.
        rule: Takes its arguments and returns its value, or a `Declined`.
        kind: "wrong" or "missing", which every `corrected()` mends, or "slow", which hodiff's own transforms spare
            where it pays.
        reason: What is amiss with torch's derivatives.
        routes: The routes by which they are; empty for "slow".
        reference: Where the rule comes from.
        least_elements: Below this size of its first argument the rule pays only for many directions at once.
        mended: The version of torch whose own derivatives are right, or "".
        mends: Says of which calls a "slow" one is needed, too, as torch's derivatives of them are wrong.
        lean: A rule that is only faster, for one that is not "slow": asked first where it pays.
        parameters: What the rule takes.
    """

    name: str
    rule: Callable[..., Any]
    kind: str
    reason: str
    routes: tuple[str, ...] = ()
    reference: str = ""
    least_elements: int = 0
    mended: str = ""
    mends: Callable[..., bool] | None = None
    lean: Callable[..., Any] | None = None
    parameters: Parameters = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", Parameters(self.rule))

    @property
    def stands_aside(self) -> bool:
        """Whether the torch in use needs no correction."""
        return bool(self.mended) and torch.__version__ >= self.mended


# What the mode looks up at every call.
CORRECTIONS: dict[Callable[..., Any], Correction] = {}

# Methods that torch writes in Python, which a compiler finds in no dictionary, by the functions that they call.
_POWER, _POWER_IN_PLACE, _NORM = Tensor.__pow__, Tensor.__ipow__, Tensor.norm
_REVERSED_DIFFERENCE: Any = Tensor.__rsub__

# All rules entered for a torch function, the newest last; the newest that does not stand aside is in `CORRECTIONS`.
_ENTERED: dict[Callable[..., Any], list[Correction]] = {}
# How many of them are hodiff's own.
_OWN: dict[Callable[..., Any], int] = {}


def register(
    *functions: Callable[..., Any],
    reason: str,
    kind: str = "wrong",
    routes: Sequence[str] = (),
    reference: str = "",
    covers: Callable[..., bool] | None = None,
    name: str | None = None,
    least_elements: int = 0,
    mended: str = "",
    mends: Callable[..., bool] | None = None,
    lean: Callable[..., Any] | None = None,
) -> Callable[[Rule], Rule]:
    r"""Decorator that enters a rule in place of a torch function: the one way in, for hodiff's rules and for yours.

    Inside `hodiff.corrected()`, and so in every transform of hodiff, a call of the torch function runs the rule. The
    newest rule of a function is in force; `unregister` brings back the one before, such as hodiff's own. What the rule
    calls is torch's own function, also where it calls it inside `corrected()` or by a transform of hodiff.

    Args:
        *functions: The torch function, by all the names it is called by: `torch.relu`, `torch.Tensor.relu`,
            `torch.nn.functional.relu`.
        reason: What is amiss with torch's derivatives.
        kind: "wrong" or "missing", or "slow" for a rule that is only faster: hodiff's own transforms take it where it
            pays.
        routes: The routes by which they are.
        reference: Where the rule comes from.
        covers: Takes the arguments and says whether the rule is needed for them; where not, it is not asked.
        name: What the table calls the function; by default torch's own name of it.
        least_elements: The size of the first argument from which on a slow one pays for a single direction.
        mended: The version of torch from which on the derivatives are right, such as "2.15": there the rule stands
            aside.
        mends: Takes the arguments and says whether a "slow" rule is needed wherever corrections are on.
        lean: A second rule that is only faster, which hodiff's own transforms ask first where it pays.

    Returns:
        The decorator. It returns the rule, which takes the arguments of the torch function and returns its value, made
        of operators that torch differentiates rightly. A rule declines a call by returning a `Declined`:
        `hodiff.corrections.UNNEEDED` where torch is right, `hodiff.corrections.unable(because)` where it is not.
        `NotImplemented` stands for the former.

    Raises:
        InputError: If no function is given, one is not callable, or the kind, a route, the least size or the version is
            not one that exists.

    Example:
        >>> import torch, hodiff
        >>> @hodiff.corrections.register(torch.lerp, reason="for the example's sake")
        ... def lerp(input, end, weight):
        ...     return input + weight * (end - input)
        >>> with hodiff.corrected():
        ...     torch.lerp(torch.tensor(3.0, requires_grad=True), torch.tensor(4.0), 0.5).grad_fn.name()
        'AddBackward0'
        >>> hodiff.corrections.unregister(torch.lerp)
    """
    _require_functions("register", functions)
    _require_options(kind, routes, least_elements, mended)
    title = name or name_of(functions[-1])

    def enter(rule: Rule) -> Rule:
        if not callable(rule):
            raise InputError(f"register: rule: expected a callable, got {type(rule).__name__}.")
        # hodiff's own rules know what they call.
        inside = _outermost(rule) if _OWN else rule
        inside = inside if covers is None else _declining(inside, covers)
        entry = Correction(title, inside, kind, reason, tuple(routes), reference, least_elements, mended, mends, lean)
        for function in dict.fromkeys(functions):
            _ENTERED.setdefault(function, []).append(entry)
            _put_in_force(function)
        return rule

    return enter


def _outermost(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule, which declines what it calls itself, by way of `corrected()` or a transform: that is torch's."""
    runs = threading.local()

    def outermost(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return rule(*args, **kwargs)
        if getattr(runs, "now", False):
            return UNNEEDED
        runs.now = True
        try:
            return rule(*args, **kwargs)
        finally:
            runs.now = False

    outermost.__qualname__ = getattr(rule, "__qualname__", repr(rule))  # for errors
    outermost.__wrapped__ = rule  # type: ignore[attr-defined]  # whose parameters it has
    return outermost


def _declining(rule: Callable[..., Any], covers: Callable[..., bool]) -> Callable[..., Any]:
    """The rule, which declines what it is not needed for."""

    def declining(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs) if covers(*args, **kwargs) else UNNEEDED

    declining.__qualname__ = getattr(rule, "__qualname__", repr(rule))  # for errors
    declining.__wrapped__ = rule  # type: ignore[attr-defined]  # whose parameters it has
    return declining


def _require_options(kind: Any, routes: Any, least_elements: Any, mended: Any) -> None:
    """Refuse what would never match a route, a size or a version."""
    require_choice("register", "kind", kind, KINDS)
    if isinstance(routes, str) or not all(each in ROUTES for each in routes):
        raise InputError(f"register: routes: expected some of hodiff.ROUTES, which are {ROUTES}, got {routes!r}.")
    require_int("register", "least_elements", least_elements, 0)
    if not isinstance(mended, str) or (mended and not re.fullmatch(r"\d+(\.\d+)+", mended)):
        raise InputError(
            f'register: mended: expected a version of torch such as "2.15", or "" where there is none, got {mended!r}.'
        )


def _require_functions(caller: str, functions: Sequence[Any]) -> None:
    """Refuse no functions at all, and what is none."""
    if not functions:
        raise InputError(f"{caller}: functions: expected at least one torch function, got none.")
    for function in functions:
        if not callable(function):
            raise InputError(
                f"{caller}: functions: expected callables, got {type(function).__name__} {function!r}. Pass the torch "
                "functions themselves, such as torch.cosh."
            )


def name_of(function: Callable[..., Any]) -> str:
    """The name by which users call a torch function."""
    name = resolve_name(function) or function.__name__
    if name.startswith("torch."):
        return name
    return f"torch.ops.{name}" if name.startswith("aten.") else f"{function.__module__ or 'torch'}.{name}"


def unregister(*functions: Callable[..., Any]) -> None:
    """Remove the newest of your rules of each function; what was in force before it is so again.

    hodiff's own rules stay: `correct=False` is the way to torch's own derivatives.

    Args:
        *functions: The torch functions, each by all the names that its rule was registered under.

    Raises:
        InputError: If one is not callable, or has no rule but hodiff's own. Then none is removed.
    """
    _require_functions("unregister", functions)
    functions = tuple(dict.fromkeys(functions))
    for function in functions:
        if len(_ENTERED.get(function, ())) > _OWN.get(function, 0):
            continue
        got = "only hodiff's own, which stays" if function in _OWN else "none"
        raise InputError(
            f"unregister: functions: expected functions with a rule that you registered, got {name_of(function)} with "
            f"{got}. Pass the functions that you gave to register; correct=False leaves hodiff's rules out."
        )
    for function in functions:
        _ENTERED[function].pop()
        _put_in_force(function)


def _put_in_force(function: Callable[..., Any]) -> None:
    """Let the mode find the newest rule that does not stand aside."""
    entry = next((each for each in reversed(_ENTERED[function]) if not each.stands_aside), None)
    if entry is None:
        CORRECTIONS.pop(function, None)
    else:
        CORRECTIONS[function] = entry


def keep_as_own() -> None:
    """Make the rules entered so far hodiff's own, which `unregister` does not remove."""
    _OWN.update((function, len(entries)) for function, entries in _ENTERED.items())


def correction_of(function: Any, args: Sequence[Any]) -> Correction | None:
    """The rule in force for a call, if there is one."""
    found = CORRECTIONS.get(function)
    if found is not None:
        return found
    if function is _NORM:
        return CORRECTIONS.get(torch.norm)
    if (function is _POWER or function is _POWER_IN_PLACE) and isinstance(args[1], (Tensor, complex)):
        return CORRECTIONS.get(Tensor.pow if function is _POWER else Tensor.pow_)
    if function is _REVERSED_DIFFERENCE and len(args) > 1 and isinstance(args[1], complex):
        return CORRECTIONS.get(torch.rsub)
    return None


@at_trace_time
def show_private_functions() -> None:
    """Let rules of compiled functions act in what dynamo traces, too."""
    show_to_modes({each for each in CORRECTIONS if isinstance(each, BuiltinFunctionType)} - {set_recording})
    give_zeros_memory()


def table() -> CorrectionTable:
    """What is corrected, by which routes, why and whence.

    Returns:
        A list with a row for each rule in force, sorted by the torch function's name, which a notebook shows as a
        table. One with a version in `mended` is corrected in older versions of torch only.

    Example:
        >>> import hodiff
        >>> row = next(row for row in hodiff.corrections.table() if row.name == "torch.nn.functional.relu")
        >>> row.kind, row.reason
        ('slow', 'the second derivative is zero, yet computed and added')
    """
    rows = {
        Row(each.name, each.kind, each.routes, each.reason, each.reference, each.mended)
        for entries in _ENTERED.values()
        for each in _in_force_or_aside(entries)
    }
    return CorrectionTable(sorted(rows))


def _in_force_or_aside(entries: list[Correction]) -> Iterator[Correction]:
    """The rule in force, and newer ones that stand aside."""
    for each in reversed(entries):
        yield each
        if not each.stands_aside:
            return
