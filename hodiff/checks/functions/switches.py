"""What the check of a function compares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

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
        gradchecks: Whether to run torch's own checks, which move every number of the input.
    """

    order: int = 2
    vmap: bool = True
    backend: str = ""
    scipy: bool = True
    seed: int = 0
    method: str = "auto"
    correct: bool = True
    gradchecks: bool = True

    @property
    def mode(self) -> AbstractContextManager[Any]:
        """The context in which derivatives are taken."""
        return corrected() if self.correct else nullcontext()
