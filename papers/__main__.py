"""Run every reproduction, or some: `python -m papers --help`."""

from __future__ import annotations

import argparse
import multiprocessing
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

from tqdm import tqdm

PAPERS = Path(__file__).resolve().parent
# What most scripts import, once for all of them: that takes longer than many a quick run.
SHARED = ["hodiff", "papers.common", "benchmarks.objectives", "scipy.optimize", "sklearn.datasets"]


def main() -> int:
    """Run the scripts one after another, quick ones some at a time; 1 if one failed."""
    names = sorted(path.parent.name for path in PAPERS.glob("*/reproduce.py"))
    parser = argparse.ArgumentParser(prog="python -m papers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller problems, some seconds each")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PAPER")
    parser.add_argument("--out", type=Path, help="with --quick, the folder for theirs; without, they are not saved")
    parser.add_argument("--jobs", type=int, default=1, help="with --quick, how many run at a time")
    options = parser.parse_args()
    if not options.quick and (options.out or options.jobs != 1):
        parser.error("--out and --jobs are for --quick: full runs are saved in their folders, and timed alone")
    failed = run_quick(options.only, options.out, options.jobs) if options.quick else run_full(options.only)
    if failed:
        tqdm.write(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run_full(names: list[str]) -> list[str]:
    """Those that failed. A process each, so that no timing depends on what ran before."""
    failed = []
    for name in tqdm(names, desc="papers", unit="paper", leave=False, disable=None):
        command = [sys.executable, str(PAPERS / name / "reproduce.py")]
        if subprocess.run(command, cwd=PAPERS.parent, check=False).returncode:
            failed.append(name)
    return failed


def run_quick(names: list[str], out: Path | None, jobs: int) -> list[str]:
    """Those that failed. Forks of a process that has imported what they share, a fresh one for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SHARED)
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        work = [(name, None if out is None else str(out / name)) for name in names]
        done = pool.imap_unordered(quick, work, chunksize=1)
        bar = tqdm(done, total=len(names), desc="papers", unit="paper", leave=False, disable=None)
        return sorted(name for name in bar if name)


def quick(work: tuple[str, str | None]) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
