"""Run all reproductions, or some: `python -m papers --help`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from papers.quick import run_quick

PAPERS = Path(__file__).resolve().parent


def main() -> int:
    """Run the scripts one after another, quick runs several at a time; return 1 if a script failed."""
    names = sorted(path.parent.name for path in PAPERS.glob("*/reproduce.py"))
    parser = argparse.ArgumentParser(prog="python -m papers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="solve smaller problems, in some seconds each")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PAPER")
    parser.add_argument("--out", type=Path, help="folder for the results of --quick; by default, they are not saved")
    parser.add_argument("--jobs", type=int, default=1, help="number of quick runs at a time")
    options = parser.parse_args()
    if not options.quick and (options.out or options.jobs != 1):
        parser.error("--out and --jobs are for --quick: full runs are saved in their folders, and timed alone")
    failed = run_quick(options.only, options.out, options.jobs) if options.quick else run_full(options.only)
    if failed:
        tqdm.write(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run_full(names: list[str]) -> list[str]:
    """Run every script in its own process, so that no timing depends on earlier runs; return the names that failed."""
    failed = []
    for name in tqdm(names, desc="papers", unit="paper", leave=False, disable=None):
        command = [sys.executable, str(PAPERS / name / "reproduce.py")]
        if subprocess.run(command, cwd=PAPERS.parent, check=False).returncode:
            failed.append(name)
    return failed


if __name__ == "__main__":
    sys.exit(main())
