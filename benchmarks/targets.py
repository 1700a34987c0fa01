"""Bounds on ratios of times, and verdicts on measured ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.race import median_ratio


@dataclass(frozen=True)
class Target:
    """Bound on the ratio of two contestants' times.

    Attributes:
        over: Contestant in the numerator.
        under: Contestant in the denominator.
        bound: Largest ratio that meets the target.
        at_least: Whether `bound` is the smallest ratio instead.
    """

    over: str
    under: str
    bound: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{self.over} / {self.under} {'≥' if self.at_least else '≤'} {self.bound:g}"


@dataclass(frozen=True)
class Verdict:
    """Target with the measured ratio, or None where a contestant was wrong."""

    target: str
    ratio: float | None
    met: bool


def judged(target: Target, ratio: float | None) -> Verdict:
    """Compare a ratio with a target; a ratio of None misses it."""
    met = ratio is not None and (ratio >= target.bound if target.at_least else ratio <= target.bound)
    return Verdict(str(target), ratio, met)


def judged_by_rounds(target: Target, seconds: Mapping[str, Sequence[float]]) -> Verdict:
    """Compare the median of the ratios within a round with a target; contestants without times miss it."""
    timed = target.over in seconds and target.under in seconds
    return judged(target, median_ratio(seconds[target.over], seconds[target.under]) if timed else None)
