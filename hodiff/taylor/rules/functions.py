"""Functions of hodiff whose derivatives are not those of their formula, or need no rule but the function itself."""

from __future__ import annotations

from typing import Any

from hodiff.functions import StraightThrough, checkpoint, checkpoint_sequential
from hodiff.taylor.jets import Jet
from hodiff.taylor.registry import RULES, Entry
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import moves, value_of


def straight_through(frame: Frame, func: Any, smooth: Any, value: Any) -> Any:
    """The derivatives of one, the value of another."""
    if not moves(frame, smooth):
        return value_of(frame, value)
    return Jet(frame, [value_of(frame, value), *smooth.coefficients[1:]])


def _plain_call(frame: Frame, func: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """A series goes forward only, so that nothing is to be computed again."""
    return f(*args, **kwargs)


def _one_after_another(frame: Frame, func: Any, functions: Any, segments: int, *args: Any) -> Any:
    """Likewise."""
    for function in functions:
        args = (function(*args),)
    return args[0]


RULES[StraightThrough] = Entry("straight_through", straight_through, analytic=True)
RULES[checkpoint] = Entry("checkpoint", _plain_call, analytic=True)
RULES[checkpoint_sequential] = Entry("checkpoint_sequential", _one_after_another, analytic=True)
