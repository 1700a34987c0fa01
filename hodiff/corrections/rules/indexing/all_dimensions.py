"""Rules for variances over `dim=()`: torch reduces all dimensions, but its derivative divides by the number of none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_operators.table import forms_of


def over_all(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments after the input of a variance, with `dim=None` instead of no dimensions."""
    if _is_empty(options.get("dim")):
        options = {**options, "dim": None}
    if arguments and _is_empty(arguments[0]):
        arguments = (None, *arguments[1:])
    return arguments, options


def _is_empty(dim: Any) -> bool:
    return isinstance(dim, tuple | list) and not dim


def _is_over_none(input: Any, *arguments: Any, dim: Any = None, **_: Any) -> bool:
    del input
    return _is_empty(dim) or (bool(arguments) and _is_empty(arguments[0]))


_wrong_over_none = partial(
    register,
    routes=ROUTES,
    reason="with `dim=()` the value is that of all numbers, and derivatives, also the first, are wrong",
    reference="the same function with `dim=None`",
    covers=_is_over_none,
)


@_wrong_over_none(*forms_of("var"))
def _var(input: Tensor, *arguments: Any, **options: Any) -> Any:
    arguments, options = over_all(arguments, options)
    return torch.var(input, *arguments, **options)


@_wrong_over_none(torch.var_mean)
def _var_mean(input: Tensor, *arguments: Any, **options: Any) -> Any:
    arguments, options = over_all(arguments, options)
    return torch.var_mean(input, *arguments, **options)
