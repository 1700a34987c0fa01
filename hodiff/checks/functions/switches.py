"""What the check of a function compares."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    order: int = 2
    vmap: bool = True
    backend: str = ""
    scipy: bool = True
    seed: int = 0
    method: str = "auto"
