"""Peak memory of a dense Hessian; every contestant runs in its own process.

The measure is the growth of the process's resident memory: its highest value during one call, less its value just
before. Calls on tiny problems run first, so that libraries that torch loads on first use are not counted. The result
itself is part of the peak.

    python -m benchmarks.memory digits-64-10-256 "hodiff.hessian_matrix"     prints bytes
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.objectives import DIGITS, digits
from benchmarks.report import table
from benchmarks.workloads.dense import HESSIANS, functional_row_by_row

STATUS = Path("/proc/self/status")
ROOT = Path(__file__).resolve().parents[1]
TITLE = "Peak memory, MiB: how far one call raised the resident memory of a fresh process, result included"


@dataclass(frozen=True)
class Peak:
    """Memory that one contestant needed for one problem."""

    problem: str
    name: str
    mebibytes: float


def dense_peaks(quick: bool) -> list[Peak]:
    """Measure the peaks of all contestants but the row-by-row loop; none without `/proc/self/status`.

    Args:
        quick: Whether to measure the smallest problem alone.

    Returns:
        One peak per problem and contestant.
    """
    if not STATUS.exists():
        return []
    contestants = [name for name, way in HESSIANS.items() if way is not functional_row_by_row]
    todo = [(problem, name) for problem in list(DIGITS)[: 1 if quick else None] for name in contestants]
    bar = tqdm(todo, desc="peak memory", leave=False, disable=None)
    return [Peak(problem, name, peak_of(problem, name) / 2**20) for problem, name in bar]


def peak_of(problem: str, name: str) -> int:
    """Return the bytes that one contestant needed, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", problem, name]
    return int(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def memory_table(peaks: Sequence[Peak]) -> str:
    """Return a table of peaks by contestant and problem; the shorter list gives the columns."""
    found = {(peak.name, peak.problem): f"{peak.mebibytes:.3g}" for peak in peaks}
    names, problems = (list(dict.fromkeys(words)) for words in zip(*found, strict=True))
    if len(names) < len(problems):
        return table(
            ["", *names], [[problem, *(found.get((name, problem), "") for name in names)] for problem in problems]
        )
    return table(["", *problems], [[name, *(found[name, problem] for problem in problems)] for name in names])


def status(field: str) -> int:
    """Return a field of `/proc/self/status` in bytes."""
    # `getrusage` does not work here: a child process inherits the maximum of its parent.
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the largest amount that torch's allocator held during a call, beyond the amount held before."""
    run()  # Warm-up: memory that is allocated once and kept is not counted.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main(problem: str, name: str) -> None:
    """Measure this process and print its peak in bytes."""
    for widths in ((4, 10), (4, 3, 10)):
        tiny = digits(*widths, samples=16)
        HESSIANS[name](tiny, tiny.parameters())
    objective = DIGITS[problem]()
    x = objective.parameters()
    # Writing 5 resets the high-water mark, which loading the libraries raised.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = status("VmRSS")
    HESSIANS[name](objective, x)
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
