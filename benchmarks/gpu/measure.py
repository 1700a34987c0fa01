"""Time, device time, peak memory and errors of contestants on a GPU; without one, only that they run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.race import Contestant, race
from benchmarks.reference import relative_error

Run = Callable[[], Any]
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


@dataclass(frozen=True)
class Row:
    """One measured contestant.

    Attributes:
        problem: Name of the problem.
        name: Name of the contestant.
        milliseconds: Median time of a call, with the host's.
        ratio: Its median ratio to the first contestant of the problem.
        device: Milliseconds of kernels per call, by the profiler.
        mebibytes: Peak memory of a call beyond what was allocated before.
        first: Seconds of the first call.
        error: Relative error to the problem's reference.
        remark: Why numbers are missing.
    """

    problem: str
    name: str
    milliseconds: float | None = None
    ratio: float | None = None
    device: float | None = None
    mebibytes: float | None = None
    first: float | None = None
    error: float | None = None
    remark: str = ""


def clock() -> float:
    """Return the seconds after all launched kernels have finished."""
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def compare(
    problem: str,
    contestants: dict[str, Run],
    reference: Callable[[], Sequence[Tensor]] | None = None,
    compared: Sequence[str] = (),
    rounds: int = 7,
) -> None:
    """Measure contestants in turn, and print a row for each as JSON.

    Args:
        problem: Name of the problem.
        contestants: Functions by name; ratios refer to the first.
        reference: Function that computes the exact answer.
        compared: Names of the contestants whose results have the form of the reference.
        rounds: Number of rounds.
    """
    exact = reference() if reference else None
    ready: dict[str, dict[str, Any]] = {}
    for name, run in contestants.items():
        try:
            start = clock()
            found = run()
            took = clock() - start
        except Exception as error:  # a peer that fails must not end the section
            report(Row(problem, name, remark=f"raised {type(error).__name__}: {str(error).splitlines()[0][:120]}"))
            continue
        ready[name] = {"first": took, "device": device_time(run), "mebibytes": peak(run)}
        if exact is not None and name in compared:
            ready[name]["error"] = max(
                relative_error(a.double().cpu(), b.cpu()) for a, b in zip(found, exact, strict=True)
            )
        del found
    seconds_by_name = race([Contestant(name, "gpu", contestants[name]) for name in ready], rounds, problem, clock)
    unit = seconds_by_name.get(next(iter(contestants)))
    for name, numbers in ready.items():
        seconds = seconds_by_name[name]
        ratio = None if unit is None else median(a / b for a, b in zip(seconds, unit, strict=True))
        report(Row(problem, name, 1e3 * median(seconds), ratio, **numbers))


def skipped(problem: str, reason: str) -> None:
    """Print a row that says why a problem or peer is missing."""
    report(Row(problem, "", remark=f"skipped: {reason}"))


def report(row: Row) -> None:
    """Print a row as JSON."""
    print(json.dumps(asdict(row)), flush=True)


def device_time(run: Run, calls: int = 3) -> float | None:
    """Return the milliseconds of kernels per call; None without a GPU."""
    if not HAS_GPU:
        return None
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in recorded.key_averages()) / calls / 1e3


def peak(run: Run) -> float | None:
    """Return the peak memory of a call in MiB beyond what is allocated; None without a GPU."""
    if not HAS_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random numbers on the device, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
