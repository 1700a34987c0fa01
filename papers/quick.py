"""Quick runs of many scripts, some at a time."""

from __future__ import annotations

import multiprocessing
import runpy
import sys
import traceback
import warnings
from pathlib import Path

from tqdm import tqdm

PAPERS = Path(__file__).resolve().parent
# What most scripts import, once for all of them: that takes longer than many a quick run.
SHARED = ["hodiff", "papers.common", "benchmarks.objectives", "scipy.optimize", "sklearn.datasets"]


def run_quick(names: list[str], out: Path | None, jobs: int) -> list[str]:
    """Those that failed. Forks of a process that has imported what they share, a fresh one for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SHARED)
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        work = [(name, None if out is None else str(out / name)) for name in names]
        done = pool.imap_unordered(run_one, work, chunksize=1)
        bar = tqdm(done, total=len(names), desc="papers", unit="paper", leave=False, disable=None)
        return sorted(name for name in bar if name)


def run_one(work: tuple[str, str | None]) -> str:
    """Run one script as a main program; its name if it failed, else an empty string."""
    name, out = work
    script = PAPERS / name / "reproduce.py"
    sys.argv = [str(script), "--quick", "--no-progress", *([] if out is None else ["--out", out])]
    # What a script does not expect is a failure; scripts silence what they do.
    warnings.simplefilter("error", UserWarning)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except (Exception, SystemExit):
        traceback.print_exc()
        return name
    return ""
