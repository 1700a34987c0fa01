"""Run a script as several processes of a gloo group, and read the output of all."""

import os
import subprocess
import sys
from pathlib import Path


def assert_two_ranks_agree(script: Path, folder: Path) -> None:
    """Run both ranks, with the rank and a rendezvous file as arguments; both must print that they agree."""
    for returncode, output in run_ranks(script, folder, 2):
        assert returncode == 0, output
        assert "both agree" in output


def assert_ranks_agree(script: Path, folder: Path, count: int) -> None:
    """Run ranks with the rank, a rendezvous file and the number of ranks as arguments; all must print `all agree`."""
    for returncode, output in run_ranks(script, folder, count):
        assert returncode == 0, output
        assert "all agree" in output


def run_ranks(script: Path, folder: Path, count: int, *arguments: str) -> list[tuple[int, str]]:
    """Run all ranks, and return the exit status and the output of each; further arguments follow those of the rank."""
    path = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    # If a rank is killed, its output has all that it wrote, and the stacks of its threads.
    reporting = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), folder / "rendezvous", str(count), *arguments],
            env={**os.environ, **reporting, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]
