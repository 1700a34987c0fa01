"""Options of a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hodiff.checks.report.data import Entry
from hodiff.corrections import corrected

METHODS = ("auto", "directions", "matrices")
# Variables that a module can be differentiated by.
WRT = ("both", "parameters", "inputs")


@dataclass(frozen=True)
class CheckOptions:
    """Options of `hodiff.check`, which documents them, and of the checks inside of a check.

    Attributes:
        backend: Backend of `torch.compile`; empty to skip that comparison.
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
    approximate: bool = False
    reference: Callable[..., Any] | None = None
    ulps: float | None = None
    loss: Callable[[Any], Tensor] | None = None
    wrt: str = "both"
    fixed: Sequence[int] = ()
    brief: bool = False
    failed: tuple[Entry, ...] = ()

    @property
    def mode(self) -> AbstractContextManager[Any]:
        """Context in which derivatives are taken."""
        return corrected() if self.correct else nullcontext()
