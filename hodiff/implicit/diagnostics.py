"""Reports of failed solutions and linear solves, as warnings or errors."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from hodiff.errors import ConvergenceError, HodiffWarning


@dataclass(frozen=True)
class Reporter:
    """Report in the name of the public function: silent without `check`, an error with `throw`, else a warning."""

    caller: str
    check: bool
    throw: bool

    def __call__(self, message: str) -> None:
        """Raise or warn."""
        if not self.check:
            return
        if self.throw:
            raise ConvergenceError(f"{self.caller}: {message}")
        warnings.warn(f"{self.caller}: {message}", HodiffWarning, stacklevel=2)


def rounding(dtype: torch.dtype, power: float) -> float:
    """Return a power of the rounding unit, the scale of every default tolerance."""
    return torch.finfo(dtype).eps ** power
