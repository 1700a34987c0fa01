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
@pytest.mark.parametrize(
    "place", ["product", "closure", "derivative of a checkpoint", "comparison", "checkpoint in a closure"]
)
def test_rank_that_raises_ends_all_ranks(tmp_path: Path, place: str) -> None:
    """The rank that raises shows its own error, and the other one names it."""
    (status, output), (other, said) = run_ranks(Path(__file__).with_name("failing_ranks.py"), tmp_path, 2, place)
    assert (other, status) == (3, 3), output + said
    assert "ValueError: this rank fails" in said
    assert "RankError: " in output
    assert "Rank 1 raised ValueError: this rank fails. torch says" in output
