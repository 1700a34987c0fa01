"""Run a script as two processes of a gloo group, and read the output of both."""

import os
import subprocess
import sys
from pathlib import Path


def assert_two_ranks_agree(script: Path, folder: Path) -> None:
    """Run both ranks, with the rank and a rendezvous file as arguments; both must print that they agree."""
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), folder / "rendezvous"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert "both agree" in output
