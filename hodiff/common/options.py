"""Validation of options: counts, numbers, switches and choices, with uniform messages.

Names of users' functions in titles and messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.errors import InputError


def name_of(f: Callable[..., Any]) -> str:
    """Return the name of a function for a title; f if it has no name of its own."""
    name = getattr(f, "__name__", type(f).__name__)
    owner = getattr(f, "__self__", None)
    if name == "apply" and isinstance(owner, type):  # of a torch.autograd.Function
        name = owner.__name__
    return "f" if name in {"<lambda>", "wrapper", "partial"} else str(name)


# NumPy's scalars count as Python's, because sizes and numbers may come from arrays.
BOOLS = (bool, np.bool_)
INTS = (int, np.integer)
NUMBERS = (int, float, np.integer, np.floating)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is an int of Python or NumPy, and not a bool."""
    return isinstance(value, INTS) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number of Python or NumPy, and not a bool."""
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


def require_int(
    caller: str,
    argument: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    *,
    optional: bool = False,
    remedy: str = "",
) -> None:
    """Raise unless the value is an int from `least` to `most`, or None if it is optional."""
    if is_int(value) and (least is None or value >= least) and (most is None or value <= most):
        return
    if optional and value is None:
        return
    bounds = "" if least is None else f" of {least} or more" if most is None else f" from {least} to {most}"
    _refuse(caller, argument, value, "an int" + bounds, optional, remedy)


def require_number(
    caller: str,
    argument: str,
    value: Any,
    *,
    positive: bool = False,
    nonnegative: bool = False,
    finite: bool = False,
    within: tuple[float, float] | None = None,
    optional: bool = False,
    remedy: str = "",
) -> None:
    """Raise unless the value is a real number with the required properties, or None if it is optional."""
    if (
        is_number(value)
        and (not positive or value > 0)
        and (not nonnegative or value >= 0)
        and (not finite or math.isfinite(value))
        and (within is None or within[0] <= value <= within[1])
    ):
        return
    if optional and value is None:
        return
    words = ["a", "positive" * positive, "nonnegative" * nonnegative, "finite" * finite, "number"]
    kind = " ".join(filter(None, words)) + (f" from {within[0]} to {within[1]}" if within else "")
    _refuse(caller, argument, value, kind, optional, remedy)


def require_amount(caller: str, argument: str, value: Any, *, positive: bool = False) -> None:
    """Raise unless the value is a finite number, nonnegative or, if required, positive."""
    require_number(caller, argument, value, positive=positive, nonnegative=not positive, finite=True)


def require_bool(caller: str, argument: str, value: Any, *, optional: bool = False, remedy: str = "") -> None:
    """Raise unless the value is True or False, or None if it is optional."""
    if not isinstance(value, BOOLS) and not (optional and value is None):
        _refuse(caller, argument, value, "True or False", optional, remedy)


def require_bools(caller: str, **switches: Any) -> None:
    """Raise unless all values are True or False."""
    for argument, each in switches.items():
        require_bool(caller, argument, each)


def require_choice(
    caller: str, argument: str, value: Any, choices: Iterable[Any], *, optional: bool = False, remedy: str = ""
) -> None:
    """Raise unless the value is one of the choices, or None if it is optional."""
    known = tuple(choices)
    if isinstance(value, str) and value in known:  # quick
        return
    # Arrays compare element by element, and 1 equals True.
    switches = bool, np.bool_
    comparable = [each for each in known if isinstance(each, switches) == isinstance(value, switches)]
    if (isinstance(value, (Tensor, np.ndarray)) or value not in comparable) and not (optional and value is None):
        _refuse(caller, argument, value, f"one of {', '.join(map(repr, known))}", optional, remedy)


def require_generator(caller: str, argument: str, value: Any, *, device: torch.device | None = None) -> None:
    """Raise unless the value is None or a torch.Generator, of the given kind of device if there is one."""
    if value is not None and not isinstance(value, torch.Generator):
        _refuse(caller, argument, value, "a torch.Generator", True, "pass torch.Generator().manual_seed(0)")
    if value is not None and device is not None and value.device.type != device.type:
        raise InputError(
            f"{caller}: {argument}: expected one on {device}, got one on {value.device}; pass torch.Generator(device)."
        )


def require_chunk_size(caller: str, argument: str, value: Any) -> None:
    """Raise unless the value is a positive int, "auto" or None."""
    if value is None or (isinstance(value, str) and value == "auto") or (is_int(value) and value >= 1):
        return
    _refuse(caller, argument, value, "a positive int, 'auto', or None for all at once")


def require_callable(caller: str, **functions: Any) -> None:
    """Raise unless all values are callable."""
    for argument, each in functions.items():
        if not callable(each):
            raise InputError(f"{caller}: {argument}: expected a callable, got {type(each).__name__}.")


def _refuse(caller: str, argument: str, value: Any, kind: str, optional: bool = False, remedy: str = "") -> None:
    got = describe(value) if isinstance(value, Tensor) else repr(value)
    ending = f"; {remedy}." if remedy else "."
    raise InputError(f"{caller}: {argument}: expected {kind}{' or None' * optional}, got {got}{ending}")
