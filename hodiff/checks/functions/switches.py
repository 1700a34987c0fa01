"""Options of a function's check."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hodiff.checks.report.data import Entry
from hodiff.corrections import corrected

METHODS = ("auto", "directions", "matrices")


@dataclass(frozen=True)
class Switches:
    """Options of a function's check.

    Attributes:
        order: Highest order of derivative.
        vmap: Whether to check batching.
        backend: Backend of `torch.compile`; empty to skip that comparison.
        scipy: Whether to run SciPy's differences.
        seed: Seed of all random numbers.
        method: Way in which the input is moved, one of `METHODS`.
        correct: Whether derivatives are taken within `hodiff.corrected()`, as hodiff's transforms take them.
        brief: Whether this is one of many checks of the same function. It skips torch's own checks, the comparison
            with torch alone, and the probes of domain edges, distant points and other devices.
        failed: Comparisons known to raise, if all failures raise; then routes are not compared again.
    """

    order: int = 2
    vmap: bool = True
    backend: str = ""
    scipy: bool = True
    seed: int = 0
    method: str = "auto"
    correct: bool = True
    brief: bool = False
    failed: tuple[Entry, ...] = ()

    @property
    def mode(self) -> AbstractContextManager[Any]:
        """Context in which derivatives are taken."""
        return corrected() if self.correct else nullcontext()
