"""Contestants timed in turn, in one process: machines drift, so only neighbours in time are compared."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tqdm import tqdm

# A measurement repeats its call until it lasts about this long, so that the clock's own cost vanishes in it.
MEASUREMENT_SECONDS = 0.01
# Thread pools spin for a moment after their last job; this lets the previous contestant's fall asleep.
PAUSE_SECONDS = 0.003


@dataclass(frozen=True)
class Contestant:
    """One way to compute the same thing.

    Attributes:
        name: What tables call it.
        group: "unit" (what the others' times are divided by), "hodiff" (its defaults), "route" (hodiff told how),
            "torch", "peer" or "peer gradient".
        run: Computes it once.
    """

    name: str
    group: str
    run: Callable[[], Any]


Clock = Callable[[], float]


def race(
    contestants: Sequence[Contestant], rounds: int, label: str, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Time every contestant once a round.

    Args:
        contestants: Who takes part.
        rounds: How many rounds.
        label: What the progress bar says.
        clock: What tells the seconds; `time.process_time`, where one thread works, stands while others have the core.

    Returns:
        Seconds a call, one number a round, by contestant.
    """
    keep_freed_memory()
    calls = {each.name: calls_in_a_measurement(each.run, clock) for each in contestants}
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # what exists already need not be searched again before every measurement
    try:
        for _ in tqdm(range(rounds), desc=label, unit="round", leave=False, disable=None):
            for each in contestants:
                gc.collect()
                time.sleep(PAUSE_SECONDS)
                # The previous contestant left caches and the allocator's free lists as suited it; one call that is
                # not timed puts them as this one leaves them, or who follows a hungry contestant pays its page faults.
                each.run()
                seconds[each.name].append(seconds_a_call(each.run, calls[each.name], clock))
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return seconds


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to some 64 MiB, instead of handing it back and paying for it page by page again.

    It sets that threshold by the largest mapping freed so far, at most 32 MiB. Without this the times of all
    contestants depend on what ran before them: page faults were seen to add a quarter.
    """
    _ = bytearray(31 * 2**20)


def calls_in_a_measurement(run: Callable[[], Any], clock: Clock) -> int:
    """How often to call within one measurement, found while warming up."""
    seconds = min(seconds_a_call(run, 1, clock) for _ in range(3))
    return max(1, round(MEASUREMENT_SECONDS / seconds))


def seconds_a_call(run: Callable[[], Any], calls: int, clock: Clock) -> float:
    """The mean time of some calls in a row."""
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls


def median_ratio(seconds: Sequence[float], unit: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return median(a / b for a, b in zip(seconds, unit, strict=True))
