"""Options of hodiff's own minimisers: dataclasses whose fields are annotated with validators."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_int, require_number
from hodiff.common.trees import describe
from hodiff.errors import InputError

T = TypeVar("T")
Validator = Callable[[str, str, Any], None]

COUNT: Validator = partial(require_int, least=0, optional=True)
PAIRS: Validator = partial(require_int, least=1)
TOLERANCE: Validator = partial(require_number, nonnegative=True)
POSITIVE: Validator = partial(require_number, positive=True)
FRACTION: Validator = partial(require_number, within=(0.0, 1.0))
SWITCH: Validator = require_bool


def options_of(takes: type[T], method: str, given: Mapping[str, Any], tol: float | None) -> T:
    """Validate the options of a method and return them; `tol` is the default of `gtol`."""
    hints = get_type_hints(takes, include_extras=True)
    validators = {name: hint.__metadata__[0] for name, hint in hints.items()}
    for name, value in given.items():
        require_known(method, name, validators)
        validators[name]("minimize", f"options[{name!r}]", value)
    return takes(**({} if tol is None else {"gtol": tol}) | dict(given))


def require_known(method: str, name: Any, known: Collection[str]) -> None:
    """Raise if a name is no option of the method."""
    if name not in known:
        # Methods that count values have no `maxiter`, although other names are closer to it.
        near = ["maxfun"] if name == "maxiter" else difflib.get_close_matches(str(name), known, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}."
        raise InputError(
            f"minimize: options: expected options of method={method!r}, got {name!r}, which it does not have; {remedy}"
        )


def require_norm(caller: str, name: str, value: Any) -> None:
    """Raise if a value is not a valid order of a norm."""
    require_number(caller, name, value, positive=True)


def require_wolfe(c1: float, c2: float) -> None:
    """Raise unless the constants of Wolfe's conditions satisfy 0 < c1 < c2 < 1."""
    if not 0 < c1 < c2 < 1:
        raise InputError(f"minimize: options: expected 0 < c1 < c2 < 1, got c1={c1} and c2={c2}.")


def require_positive_matrix(caller: str, name: str, value: Any) -> None:
    """Raise if a value is neither None nor a symmetric positive definite matrix."""
    if value is None:
        return
    square = isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == value.shape[1]
    if not (square and value.is_floating_point() and torch.allclose(value, value.mT)):
        raise InputError(f"{caller}: {name}: expected a symmetric matrix (n, n) or None, got {describe(value)}.")
    if bool(torch.linalg.cholesky_ex(value)[1]):
        raise InputError(f"{caller}: {name}: expected a positive definite matrix, got one that is not.")


def require_map(caller: str, name: str, value: Any) -> None:
    """Raise if a value is neither None, a callable nor a vector."""
    if value is not None and not callable(value) and not (isinstance(value, Tensor) and value.dim() == 1):
        raise InputError(
            f"{caller}: {name}: expected a callable for vectors (n,), a tensor (n,) for a diagonal or None, got "
            f"{describe(value)}."
        )
