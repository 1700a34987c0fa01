"""Tests that the compiled kernels read and write only within the memory of their tensors."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hodiff.kernels import fused

PROGRAM = Path(__file__).with_name("guarded_calls.py")
CALLS = ("elementwise", "rows", "series", "squares", "logits", "heads")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the program protects pages as Linux does"),
    pytest.mark.skipif(not fused.available(), reason="the kernels were not built"),
]


def run(*calls: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, *calls], capture_output=True, text=True, timeout=600, check=False)


def test_kernels_stay_within_the_memory_of_their_tensors() -> None:
    done = run(*CALLS)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.endswith("all are within their memory")


def test_one_element_past_a_tensor_kills_the_process() -> None:
    done = run("one_further")
    assert done.returncode == -signal.SIGSEGV, (done.stdout, done.stderr)
