"""Quick runs of many scripts, several at a time."""

from __future__ import annotations

import multiprocessing
import runpy
import sys
import warnings
from multiprocessing.pool import ThreadPool
from pathlib import Path

from tqdm import tqdm

PAPERS = Path(__file__).resolve().parent
# Modules that most scripts import, loaded once: importing takes longer than many quick runs.
SHARED = ["hodiff", "papers.common", "benchmarks.objectives", "scipy.optimize", "sklearn.datasets"]


def run_quick(names: list[str], out: Path | None, jobs: int) -> list[str]:
    """Run every script in a fresh fork of a process with the shared imports; return the names that failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SHARED)

    def run(name: str) -> int | None:
        # Not a process pool: its workers may not start processes, as some scripts do.
        process = context.Process(target=run_one, args=(name, None if out is None else str(out / name)))
        process.start()
        process.join()
        return process.exitcode

    with ThreadPool(jobs) as pool:
        codes = pool.imap(run, names)
        bar = tqdm(codes, total=len(names), desc="papers", unit="paper", leave=False, disable=None)
        return [name for name, code in zip(names, bar, strict=True) if code]


def run_one(name: str, out: str | None) -> None:
    """Run one script as a main program."""
    script = PAPERS / name / "reproduce.py"
    sys.argv = [str(script), "--quick", "--no-progress", *([] if out is None else ["--out", out])]
    # Unexpected warnings are failures; scripts silence the warnings that they expect.
    warnings.simplefilter("error", UserWarning)
    runpy.run_path(str(script), run_name="__main__")
