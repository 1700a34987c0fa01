"""The exceptions and warnings that hodiff raises."""

from __future__ import annotations

import inspect
from typing import Any


class HodiffError(Exception):
    """Base class of every error that hodiff raises on purpose."""


class InputError(HodiffError, ValueError):
    """An argument is not what the function needs; the message names the argument and says what to pass instead."""


class RouteError(HodiffError, RuntimeError):
    """A derivative does not exist by the requested route, or by any; the message lists the error of each route."""


class ConvergenceError(HodiffError, RuntimeError):
    """An iteration stopped before its tolerance, or its problem is singular; the message has the residual.

    Args:
        message: What did not converge, why, and what to do.
        result: The state of the iteration, if it has one.
    """

    def __init__(self, message: str, result: Any = None):
        super().__init__(message)
        self.result = result


class RankError(HodiffError, RuntimeError):
    """Ranks of `torch.distributed` that compute together could not exchange tensors: another rank raised or stopped."""


class CheckError(HodiffError, AssertionError):
    """A derivative disagrees with an independent route to it."""


class HodiffWarning(UserWarning):
    """A result was computed, but something about it deserves a look."""


def levels_to_the_caller() -> int:
    """Count the levels of the stack from the calling function to the first one outside of hodiff and torch."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("hodiff", "torch"):
        frame, level = frame.f_back, level + 1
    return level
