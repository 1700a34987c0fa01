"""Two gloo ranks attend within their heads, and get what one rank gets of whole tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    script = Path(__file__).with_name("attention_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "rendezvous"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert "both agree" in output
