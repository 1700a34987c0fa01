"""Run every reproduction, or some: `python -m papers --help`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

PAPERS = Path(__file__).resolve().parent


def main() -> int:
    """Run the scripts one after another; 1 if one failed."""
    names = sorted(path.parent.name for path in PAPERS.glob("*/reproduce.py"))
    parser = argparse.ArgumentParser(prog="python -m papers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller problems, half a minute each; not saved")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PAPER")
    options = parser.parse_args()
    failed = []
    # A process each, so that no timing depends on what ran before.
    for name in tqdm(options.only, desc="papers", unit="paper", leave=False, disable=None):
        command = [sys.executable, str(PAPERS / name / "reproduce.py"), *(["--quick"] if options.quick else [])]
        if subprocess.run(command, cwd=PAPERS.parent, check=False).returncode:
            failed.append(name)
    if failed:
        tqdm.write(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
