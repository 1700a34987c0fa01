"""What the check of a function compares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hodiff.checks.report.data import Entry
from hodiff.corrections import corrected

METHODS = ("auto", "directions", "matrices")


@dataclass(frozen=True)
class Switches:
    """What to compare, and how.

    Attributes:
        order: Highest order of derivative.
        vmap: Whether to check batching.
        backend: Of `torch.compile`; empty to leave that out.
        scipy: Whether to run SciPy's differences.
        seed: Of everything random.
        method: How the input is moved: one of `METHODS`.
        correct: Whether derivatives are taken within `hodiff.corrected()`, as hodiff's transforms take them.
        brief: Whether this is one of many checks of the same function: what torch's own checks say is left out, what
            torch alone would give, and what is looked for at edges, far away and on other devices.
        failed: What is known to raise, if that is all that fails: then nothing is compared again.
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
        """The context in which derivatives are taken."""
        return corrected() if self.correct else nullcontext()
