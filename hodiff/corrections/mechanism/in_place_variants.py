"""Rules for in-place variants of functions: the function's rule, whose value is written into the input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hodiff.corrections.mechanism.declining import Declined
from hodiff.corrections.mechanism.registry import CORRECTIONS, register
from hodiff.torch_operators.table import forms_of

# Functions whose in-place variants share the fault.
NAMES = (
    *("acosh", "asinh", "atan", "digamma", "expm1", "i0", "lgamma"),
    *("logit", "mvlgamma", "sigmoid", "sinc", "tan", "tanh"),
)


def in_place(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for the in-place variant of a function, which writes the value of a rule into its input."""

    @functools.wraps(rule)
    def written(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = rule(input.clone(), *args, **kwargs)
        return result if isinstance(result, Declined) else input.copy_(result)

    return written


def enter_in_place() -> None:
    """Register the rules, once the rules of the functions themselves are in force."""
    for name in NAMES:
        entry = CORRECTIONS.get(getattr(Tensor, name))
        if entry is not None:  # else this version of torch needs no rule
            register(
                *forms_of(f"{name}_"),
                name=f"torch.Tensor.{name}_",
                kind=entry.kind,
                routes=entry.routes,
                reason=entry.reason,
                reference=entry.reference,
            )(in_place(entry.rule))
