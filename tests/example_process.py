"""Run an example as a script, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARNINGS_ARE_ERRORS = (sys.executable, "-W", "error::UserWarning")


def example_process(
    name: str, *options: str | Path, launcher: tuple[str, ...] = WARNINGS_ARE_ERRORS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, f"examples/{name}.py", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
