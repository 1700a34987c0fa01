"""The table of torch functions that hodiff has a better rule for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Correction:
    """A rule in place of a torch function.

    Attributes:
        name: The torch function, as users write it.
        rule: Takes its arguments and returns its value.
        applies: Given its arguments, whether the rule covers them; torch's own runs where not.
        reason: What is amiss with torch's derivatives.
        least_elements: Below this size of its first argument the rule pays only for many directions at once.
    """

    name: str
    rule: Callable[..., Any]
    applies: Callable[..., bool]
    reason: str
    least_elements: int = 0


CORRECTIONS: dict[Callable[..., Any], Correction] = {}


def correct(functions: Iterable[Callable[..., Any]], correction: Correction) -> None:
    """Enter a rule for all the names under which torch has one function.

    Args:
        functions: torch's function objects, as a TorchFunctionMode sees them.
        correction: The rule.
    """
    for function in functions:
        CORRECTIONS[function] = correction


def table() -> list[tuple[str, str]]:
    """What is corrected, and why.

    Returns:
        Pairs of a torch function and what is amiss with its derivatives.

    Example:
        >>> from hodiff.corrections import table
        >>> dict(table())["torch.nn.functional.relu"]
        'slow: the second derivative is zero, yet computed and added'
    """
    return sorted({(each.name, each.reason) for each in CORRECTIONS.values()})
