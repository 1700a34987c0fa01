"""Bounds on ratios, and whether they were met: judged from what was measured, whenever it is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.race import median_ratio


@dataclass(frozen=True)
class Target:
    """A bound on what one contestant takes over what another does.

    Attributes:
        over: The contestant in question.
        under: Whom it is compared with.
        bound: The most that the ratio may be.
        at_least: Whether it is the least instead.
    """

    over: str
    under: str
    bound: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{self.over} / {self.under} {'≥' if self.at_least else '≤'} {self.bound:g}"


@dataclass(frozen=True)
class Verdict:
    """A target and the ratio that was found, or none where a contestant was wrong."""

    target: str
    ratio: float | None
    met: bool


def judged(target: Target, ratio: float | None) -> Verdict:
    """Whether a ratio meets a target; one that could not be measured does not."""
    met = ratio is not None and (ratio >= target.bound if target.at_least else ratio <= target.bound)
    return Verdict(str(target), ratio, met)


def judged_by_rounds(target: Target, seconds: Mapping[str, Sequence[float]]) -> Verdict:
    """By the median of the ratios within a round, of those contestants that were timed."""
    timed = target.over in seconds and target.under in seconds
    return judged(target, median_ratio(seconds[target.over], seconds[target.under]) if timed else None)
