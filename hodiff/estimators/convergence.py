"""The error, or the warning, of an iteration that did not converge."""

from __future__ import annotations

import warnings
from typing import Any

from hodiff.errors import ConvergenceError, HodiffWarning


def not_converged(message: str, result: Any, *, throw: bool) -> None:
    """Raise a `ConvergenceError`, or warn where the caller asked for the result all the same."""
    if throw:
        raise ConvergenceError(message, result)
    # Past this function and the public one, to the user's line.
    warnings.warn(message, HodiffWarning, stacklevel=3)
