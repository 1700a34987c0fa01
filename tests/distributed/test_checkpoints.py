"""Computations that two ranks began resume on one, two or four ranks."""

from pathlib import Path

import pytest
import torch.distributed as dist
from two_ranks import assert_ranks_agree

SCRIPT = Path(__file__).with_name("checkpoints_ranks.py")


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
def test_runs_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    for run, count in (("start", 2), ("one", 1), ("two", 2), ("four", 4)):
        (tmp_path / run).mkdir()
        assert_ranks_agree(SCRIPT, tmp_path / run, count)
        assert sorted(each.name for each in (tmp_path / "states").iterdir()) == ["eigsh", "solve", "spectral_density"]
