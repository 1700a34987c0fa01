"""What comes before a race."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preparation:
    """Pattern and coloring: seconds of the processor, and how many colors."""

    seconds: float
    colors: int
