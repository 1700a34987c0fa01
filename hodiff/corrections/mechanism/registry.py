"""Registry of the rules for torch functions: `register`, `unregister`, and which rule applies to a call."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name

from hodiff.common.options import require_choice, require_int
from hodiff.corrections.mechanism.argument_forms import Parameters
from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.errors import InputError
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.grad_mode import set_recording
from hodiff.torch_internals.compilers.dynamo import at_trace_time, give_zeros_memory, show_to_modes

Rule = TypeVar("Rule", bound=Callable[..., Any])

# Faults of torch's derivatives: silently wrong, not implemented, or right and slow.
KINDS = ("wrong", "missing", "slow")


@dataclass(frozen=True)
class Correction:
    """A rule that replaces a torch function.

    Attributes:
        name: The torch function, as users write it.
        rule: Takes the function's arguments and returns its value, or a `Declined`.
        kind: "wrong" or "missing", which every `corrected()` corrects, or "slow", which hodiff's own transforms correct
            where the rule is faster.
        reason: What is wrong with torch's derivatives.
        routes: The routes with that fault; empty for "slow".
        reference: Source of the rule.
        least_elements: Size of the first argument below which the rule is faster only for many directions at once.
        devices: Kinds of devices on which a rule that is only faster was measured to be faster; none means all.
        mended: The version of torch whose own derivatives are right, or "".
        mends: Takes the arguments and returns whether a "slow" rule is needed, as torch's derivatives are wrong.
        lean: A second rule that is only faster, for one that is not "slow": called first where it is faster.
        parameters: Parameters of the rule.
    """

    name: str
    rule: Callable[..., Any]
    kind: str
    reason: str
    routes: tuple[str, ...] = ()
    reference: str = ""
    least_elements: int = 0
    devices: tuple[str, ...] = ()
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


# Rules in force, which the mode looks up at every call.
CORRECTIONS: dict[Callable[..., Any], Correction] = {}

# torch's Python methods, which a compiler finds in no dictionary; they take the rules of functions that they call.
_POWER, _POWER_IN_PLACE, _NORM = Tensor.__pow__, Tensor.__ipow__, Tensor.norm
_REVERSED_DIFFERENCE: Any = Tensor.__rsub__

# All rules registered for a torch function, the newest last. `CORRECTIONS` has the newest that this torch needs.
_ENTERED: dict[Callable[..., Any], list[Correction]] = {}
# How many rules there were when their functions were last shown to dynamo.
_shown = [0]
# Number of hodiff's own rules for a torch function.
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
    devices: Sequence[str] = (),
    mended: str = "",
    mends: Callable[..., bool] | None = None,
    lean: Callable[..., Any] | None = None,
) -> Callable[[Rule], Rule]:
    r"""Decorator that registers a rule for a torch function, as hodiff's own rules are registered.

    Inside `hodiff.corrected()`, and so in every transform of hodiff, a call of the torch function runs the rule. The
    newest rule of a function is in force; `unregister` restores the rule before, such as hodiff's own. If the rule
    itself calls the function, even inside `corrected()` or by a transform of hodiff, torch's own function runs.

    Args:
        *functions: The torch function, under all its names: `torch.relu`, `torch.Tensor.relu`,
            `torch.nn.functional.relu`.
        reason: What is wrong with torch's derivatives.
        kind: "wrong" or "missing", or "slow" for a rule that is only faster: hodiff's own transforms use it where it is
            faster.
        routes: The routes with that fault.
        reference: Source of the rule.
        covers: Takes the arguments and returns whether the rule is needed; if not, torch's function runs.
        name: Name of the function in the table; by default torch's own name.
        least_elements: Size of the first argument from which a "slow" rule is faster for a single direction.
        devices: Kinds of devices, such as `("cpu",)`, on which a rule that is only faster is faster: on others, torch's
            function runs. None means all devices.
        mended: The version of torch from which the derivatives are right, such as "2.15": the rule is not used there.
        mends: Takes the arguments and returns whether a "slow" rule is needed wherever corrections are active.
        lean: A second rule that is only faster, which hodiff's own transforms call first where it is faster.

    Returns:
        The decorator, which returns the rule. A rule takes the arguments of the torch function and returns its value,
        computed by operators that torch differentiates correctly. To decline a call, it returns a `Declined`:
        `hodiff.corrections.UNNEEDED` where torch is right, `hodiff.corrections.unable(because)` where it is not.
        `NotImplemented` means `UNNEEDED`.

    Raises:
        InputError: If no function is given, a function is not callable, or the kind, a route, the least size, a device
            or the version is invalid.

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
    _require_options(kind, routes, least_elements, devices, mended)
    title = name or name_of(functions[-1])

    def enter(rule: Rule) -> Rule:
        if not callable(rule):
            raise InputError(f"register: rule: expected a callable, got {type(rule).__name__}.")
        # hodiff's own rules do not call themselves.
        inside = _outermost(rule) if _OWN else rule
        inside = inside if covers is None else _declining(inside, covers)
        speed = (least_elements, tuple(devices))
        entry = Correction(title, inside, kind, reason, tuple(routes), reference, *speed, mended, mends, lean)
        for function in dict.fromkeys(functions):
            _ENTERED.setdefault(function, []).append(entry)
            _put_in_force(function)
        return rule

    return enter


def _outermost(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule, which declines calls from inside itself, so that torch's function runs there."""
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
    """Return the rule, which declines calls that it does not cover."""

    def declining(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs) if covers(*args, **kwargs) else UNNEEDED

    declining.__qualname__ = getattr(rule, "__qualname__", repr(rule))  # for errors
    declining.__wrapped__ = rule  # type: ignore[attr-defined]  # whose parameters it has
    return declining


def _require_options(kind: Any, routes: Any, least_elements: Any, devices: Any, mended: Any) -> None:
    require_choice("register", "kind", kind, KINDS)
    if isinstance(routes, str) or not all(each in ROUTES for each in routes):
        raise InputError(f"register: routes: expected some of hodiff.ROUTES, which are {ROUTES}, got {routes!r}.")
    require_int("register", "least_elements", least_elements, 0)
    if isinstance(devices, str) or not all(isinstance(each, str) for each in devices):
        raise InputError(f'register: devices: expected kinds of devices, such as ("cpu",), got {devices!r}.')
    if not isinstance(mended, str) or (mended and not re.fullmatch(r"\d+(\.\d+)+", mended)):
        raise InputError(
            f'register: mended: expected a version of torch such as "2.15", or "" for none, got {mended!r}.'
        )


def _require_functions(caller: str, functions: Sequence[Any]) -> None:
    if not functions:
        raise InputError(f"{caller}: functions: expected at least one torch function, got none.")
    for function in functions:
        if not callable(function):
            raise InputError(
                f"{caller}: functions: expected callables, got {type(function).__name__} {function!r}. Pass the torch "
                "functions themselves, such as torch.cosh."
            )


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which users call a torch function."""
    name = resolve_name(function) or function.__name__
    if name.startswith("torch."):
        return name
    return f"torch.ops.{name}" if name.startswith("aten.") else f"{function.__module__ or 'torch'}.{name}"


def unregister(*functions: Callable[..., Any]) -> None:
    """Remove your newest rule for each function, and restore the rule before it.

    hodiff's own rules remain; use `correct=False` for torch's own derivatives.

    Args:
        *functions: The torch functions, under all names with which their rules were registered.

    Raises:
        InputError: If a function is not callable, or has no rule but hodiff's own. No rule is removed then.
    """
    _require_functions("unregister", functions)
    functions = tuple(dict.fromkeys(functions))
    for function in functions:
        if len(_ENTERED.get(function, ())) > _OWN.get(function, 0):
            continue
        got = "only hodiff's own, which stays" if function in _OWN else "none"
        raise InputError(
            f"unregister: functions: expected functions with a rule that you registered, got {name_of(function)} with "
            f"{got}. Pass the functions that you passed to register; correct=False disables hodiff's rules."
        )
    for function in functions:
        _ENTERED[function].pop()
        _put_in_force(function)


def _put_in_force(function: Callable[..., Any]) -> None:
    """Put the newest rule that this torch needs in force."""
    entry = next((each for each in reversed(_ENTERED[function]) if not each.stands_aside), None)
    if entry is None:
        CORRECTIONS.pop(function, None)
    else:
        CORRECTIONS[function] = entry


def keep_as_own() -> None:
    """Mark the rules registered so far as hodiff's own, which `unregister` does not remove."""
    _OWN.update((function, len(entries)) for function, entries in _ENTERED.items())


def correction_of(function: Any, args: Sequence[Any]) -> Correction | None:
    """Return the rule in force for a call, or None."""
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
def show_private_functions(compiling: bool) -> None:
    """Apply rules of functions that torch does not list as overridable in dynamo's traces, too."""
    if _shown[0] != len(CORRECTIONS):
        functional = {each for each in vars(torch.nn.functional).values() if isinstance(each, FunctionType)}
        builtins = {each for each in CORRECTIONS if isinstance(each, BuiltinFunctionType)}
        show_to_modes((builtins | functional & CORRECTIONS.keys()) - {set_recording})
        _shown[0] = len(CORRECTIONS)
    if compiling:
        give_zeros_memory()


def listed_corrections() -> Iterator[Correction]:
    """Yield for each function the rule in force, and newer rules that this torch does not need."""
    for entries in _ENTERED.values():
        for each in reversed(entries):
            yield each
            if not each.stands_aside:
                break
