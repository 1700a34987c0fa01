"""The table of torch functions that hodiff has a better rule for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch.overrides import resolve_name

from hodiff.errors import InputError

Rule = TypeVar("Rule", bound=Callable[..., Any])

# What may be amiss with torch's derivatives: silently wrong, not implemented, or right and slow.
KINDS = ("wrong", "missing", "slow")


def always(*_: Any, **__: Any) -> bool:
    """Cover all arguments."""
    return True


@dataclass(frozen=True)
class Correction:
    """A rule in place of a torch function.

    Attributes:
        name: The torch function, as users write it.
        rule: Takes its arguments and returns its value; `NotImplemented` leaves the call to torch.
        kind: "wrong" or "missing", which every `corrected()` mends, or "slow", which hodiff's own transforms spare
            where it pays.
        reason: What is amiss with torch's derivatives.
        routes: The routes by which they are; empty for "slow".
        reference: Where the rule comes from.
        covers: Given the arguments, whether the rule is meant for them; torch's own function runs where not.
        least_elements: Below this size of its first argument the rule pays only for many directions at once.
    """

    name: str
    rule: Callable[..., Any]
    kind: str
    reason: str
    routes: tuple[str, ...] = ()
    reference: str = ""
    covers: Callable[..., bool] = always
    least_elements: int = 0


class Row(NamedTuple):
    """A line of `hodiff.corrections.table()`: see `Correction`."""

    name: str
    kind: str
    routes: tuple[str, ...]
    reason: str
    reference: str


CORRECTIONS: dict[Callable[..., Any], Correction] = {}


def correct(functions: Iterable[Callable[..., Any]], correction: Correction) -> None:
    """Enter a rule for all the names under which torch has one function.

    Args:
        functions: torch's function objects, as a TorchFunctionMode sees them.
        correction: The rule.
    """
    for function in functions:
        CORRECTIONS[function] = correction


def register(
    *functions: Callable[..., Any],
    reason: str,
    kind: str = "wrong",
    routes: Sequence[str] = (),
    reference: str = "",
    covers: Callable[..., bool] = always,
    name: str | None = None,
) -> Callable[[Rule], Rule]:
    r"""Decorator that enters a rule in place of a torch function.

    Inside `hodiff.corrected()`, and so in every transform of hodiff, a call of the torch function runs the rule.

    Args:
        *functions: The torch function, by all the names it is called by: `torch.relu`, `torch.Tensor.relu`,
            `torch.nn.functional.relu`.
        reason: What is amiss with torch's derivatives.
        kind: "wrong" or "missing".
        routes: The routes by which they are.
        reference: Where the rule comes from.
        covers: Takes the arguments and says whether the rule is meant for them; torch's own function runs where not.
        name: What the table calls the function; by default torch's own name of it.

    Returns:
        The decorator. It returns the rule, which takes the arguments of the torch function and returns its value, made
        of operators that torch differentiates rightly. A rule that returns `NotImplemented` leaves the call to torch.

    Raises:
        InputError: If no function is given, one is not callable, or the kind is unknown.

    Example:
        >>> import torch, hodiff
        >>> @hodiff.corrections.register(torch.hypot, reason="for the example's sake")
        ... def hypot(input, other):
        ...     return (input**2 + other**2).sqrt()
        >>> with hodiff.corrected():
        ...     torch.hypot(torch.tensor(3.0, requires_grad=True), torch.tensor(4.0)).grad_fn.name()
        'SqrtBackward0'
        >>> hodiff.corrections.unregister(torch.hypot)
    """
    if not functions:
        raise InputError("register: functions: expected at least one torch function, got none.")
    for function in functions:
        if not callable(function):
            raise InputError(f"register: functions: expected callables, got {type(function).__name__}.")
    if kind not in KINDS:
        raise InputError(f"register: kind: expected one of {KINDS}, got {kind!r}.")
    title = name or _name_of(functions[-1])

    def enter(rule: Rule) -> Rule:
        if not callable(rule):
            raise InputError(f"register: rule: expected a callable, got {type(rule).__name__}.")
        correct(functions, Correction(title, rule, kind, reason, tuple(routes), reference, covers))
        return rule

    return enter


def _name_of(function: Callable[..., Any]) -> str:
    """The name by which users call a torch function."""
    name = resolve_name(function) or function.__name__
    if name.startswith("torch."):
        return name
    return f"torch.ops.{name}" if name.startswith("aten.") else f"{function.__module__ or 'torch'}.{name}"


def unregister(*functions: Callable[..., Any]) -> None:
    """Remove the rules of torch functions; those without one are passed over.

    Args:
        *functions: The torch functions.
    """
    for function in functions:
        CORRECTIONS.pop(function, None)


def table() -> list[Row]:
    """What is corrected, by which routes, why and whence.

    Returns:
        A row for each torch function, sorted by name.

    Example:
        >>> import hodiff
        >>> row = next(row for row in hodiff.corrections.table() if row.name == "torch.nn.functional.relu")
        >>> row.kind, row.reason
        ('slow', 'the second derivative is zero, yet computed and added')
    """
    return sorted({
        Row(each.name, each.kind, each.routes, each.reason, each.reference) for each in CORRECTIONS.values()
    })
