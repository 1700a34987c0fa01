"""Derivatives, operators and estimates of sharded models equal those of the whole model in one process."""

from pathlib import Path

import pytest
import torch.distributed as dist
from two_ranks import assert_ranks_agree, run_ranks


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "count"),
    [("products", 2), ("products", 4), ("modules", 2), ("meshes", 4), ("checkpointing", 2), ("checkpointing", 4)],
)
def test_ranks_agree_with_one_process(tmp_path: Path, script: str, count: int) -> None:
    assert_ranks_agree(Path(__file__).with_name(f"{script}_ranks.py"), tmp_path, count)


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
@pytest.mark.parametrize("place", ["product", "closure"])
def test_rank_that_raises_ends_all_ranks(tmp_path: Path, place: str) -> None:
    (status, output), (other, said) = run_ranks(Path(__file__).with_name("failing_ranks.py"), tmp_path, 2, place)
    assert other == 1
    assert "this rank fails" in said
    assert status == 3, output
    assert "RankError" in output
    assert "Another rank raised an error" in output
