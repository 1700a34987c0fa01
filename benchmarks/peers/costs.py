"""Costs of preparations before a race."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preparation:
    """Cost of pattern and coloring: processor seconds and number of colors."""

    seconds: float
    colors: int
