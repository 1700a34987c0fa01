"""Arguments of SciPy's functions that hodiff's functions do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from hodiff.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

_EXACT = "omit it, because hodiff computes exact derivatives of f"
_CLOSURE = "pass the arguments of f after x0, or a function that closes over them"
_SHOWN = "omit it, and read the result"

OF_MINIMIZE = {"args": _CLOSURE, **dict.fromkeys(("jac", "hess", "hessp"), _EXACT)}
OF_LEAST_SQUARES = {
    "args": _CLOSURE,
    "kwargs": _CLOSURE,
    **dict.fromkeys(("jac", "diff_step", "jac_sparsity", "workers"), _EXACT),
    "tr_options": "omit it; SciPy's defaults apply",
    "verbose": _SHOWN,
    "callback": "omit it; Ctrl-C ends a run with the best point so far, and max_nfev limits it",
}


def refusing(remedies: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to raise `InputError` for SciPy's arguments, with the remedy of each."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in remedies:
                    raise InputError(
                        f"{function.__name__}: {name}: expected no argument of this name, unlike "
                        f"scipy.optimize.{function.__name__}, got {type(kwargs[name]).__name__}; {remedies[name]}."
                    )
            return function(*args, **kwargs)

        return run

    return decorate
