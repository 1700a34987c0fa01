"""Measure MAGIC of bergson with three kinds of attention: time, in turns in one process, and memory, in one each.

    .venv-doors/bergson/bin/python tests/doors/bergson/measure_attention.py

Memory is the peak of the resident memory above that before the run. It needs Linux.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import doors.bergson.conftest  # noqa: F401 - hides packages that do not load
import torch
from doors.bergson.magic import draw, scores
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff

KINDS = {
    "eager": ("eager", contextlib.nullcontext),
    "sdpa, math back end": ("sdpa", lambda: sdpa_kernel(SDPBackend.MATH)),
    "sdpa within corrected()": ("sdpa", hodiff.corrected),
}


def report(words):
    """Write a line at once."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def run(kind, length):
    attention, context = KINDS[kind]
    model, tokens = draw(length, attention)
    start = time.perf_counter()
    with context():
        scores(model, tokens)
    return time.perf_counter() - start


def memory(kind, length):
    """Return the peak of the resident memory in MB, above that before the run."""
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = float(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1])
    run(kind, length)
    after = float(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1])
    return (after - before) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-of", choices=KINDS, help="measure memory only, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        report(f"peak {memory(options.memory_of, options.lengths[0]):.0f}")
        return
    report("| tokens | attention | seconds | ratio | MB |\n|---|---|---|---|---|")
    for kind in KINDS:
        run(kind, 16)  # imports and first calls
    for length in options.lengths:
        seconds = {kind: min(each) for kind, each in zip(KINDS, zip(*(
            [run(kind, length) for kind in KINDS] for _ in range(options.rounds)
        ), strict=True), strict=True)}  # fmt: skip
        for kind, best in seconds.items():
            command = [sys.executable, "-W", "ignore", __file__, "--lengths", str(length), "--memory-of", kind]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = text.rpartition("peak ")[2].strip()
            report(f"| {length} | {kind} | {best:.2f} | {best / seconds['eager']:.2f} | {found} |")


if __name__ == "__main__":
    main()
