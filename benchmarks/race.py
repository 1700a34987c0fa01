"""Races that time contestants in turn in one process: machines drift, so only neighbours in time are compared."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from tqdm import tqdm

# A measurement repeats its call until it lasts about this long, so that the clock's own cost is negligible.
MEASUREMENT_SECONDS = 0.01
# Thread pools spin for a moment after their last job; this pause lets the previous contestant's threads sleep.
PAUSE_SECONDS = 0.003


@dataclass(frozen=True)
class Contestant:
    """One way to compute the result of a problem.

    Attributes:
        name: Name in tables.
        group: "unit" (its time divides all others), "hodiff" (its defaults), "route" (hodiff with an explicit route),
            "torch", "peer" or "peer gradient".
        run: Function that computes the result once.
        turn: Returns a context of its turns, for what must not be active in the turns of others.
    """

    name: str
    group: str
    run: Callable[[], Any]
    turn: Callable[[], AbstractContextManager[None]] = nullcontext


Clock = Callable[[], float]


def race(
    contestants: Sequence[Contestant], rounds: int, label: str, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Time every contestant once per round.

    Args:
        contestants: Contestants to time.
        rounds: Number of rounds.
        label: Label of the progress bar.
        clock: Function that returns seconds. With one thread, `time.process_time` excludes time of other processes.

    Returns:
        Seconds per call by contestant, one number per round.
    """
    keep_freed_memory()
    calls = {}
    for each in contestants:
        with each.turn():
            calls[each.name] = calls_in_a_measurement(each.run, clock)
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # `gc.collect` then skips objects that exist already.
    try:
        for _ in tqdm(range(rounds), desc=label, unit="round", leave=False, disable=None):
            for each in contestants:
                gc.collect()
                time.sleep(PAUSE_SECONDS)
                with each.turn():
                    # The previous contestant changed the caches and the allocator's free lists. One call without timing
                    # restores them; otherwise a contestant pays for the page faults of the one before.
                    each.run()
                    seconds[each.name].append(seconds_a_call(each.run, calls[each.name], clock))
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return seconds


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, up to some 64 MiB, instead of returning it and faulting in page after page again.

    glibc sets its threshold by the largest mapping freed so far, at most 32 MiB. Without this call the times of all
    contestants depend on what ran before them: page faults added a quarter to some times.
    """
    _ = bytearray(31 * 2**20)


def calls_in_a_measurement(run: Callable[[], Any], clock: Clock) -> int:
    """Return the number of calls in one measurement, estimated during warm-up."""
    seconds = min(seconds_a_call(run, 1, clock) for _ in range(3))
    return max(1, round(MEASUREMENT_SECONDS / seconds))


def seconds_a_call(run: Callable[[], Any], calls: int, clock: Clock) -> float:
    """Return the mean seconds per call over consecutive calls."""
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls


def median_ratio(seconds: Sequence[float], unit: Sequence[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return median(a / b for a, b in zip(seconds, unit, strict=True))
