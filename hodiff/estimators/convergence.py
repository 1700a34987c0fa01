"""Error or warning of an iteration that did not converge."""

from __future__ import annotations

import warnings
from typing import Any

from hodiff.errors import ConvergenceError, HodiffWarning


def not_converged(message: str, result: Any, *, throw: bool) -> None:
    """Raise a `ConvergenceError` with the result, or warn if `throw` is false."""
    if throw:
        raise ConvergenceError(message, result)
    # The warning points past this function and the public one, to the user's line.
    warnings.warn(message, HodiffWarning, stacklevel=3)
