"""Estimates of sharded operators equal those of the whole model in one process, on any number of ranks."""

from pathlib import Path

import pytest
import torch.distributed as dist
from two_ranks import assert_ranks_agree


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_estimates_do_not_depend_on_the_number_of_ranks(tmp_path: Path, count: int) -> None:
    assert_ranks_agree(Path(__file__).with_name("estimates_ranks.py"), tmp_path, count)


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
def test_padded_tokens_count_right_over_ranks(tmp_path: Path) -> None:
    assert_ranks_agree(Path(__file__).with_name("padding_ranks.py"), tmp_path, 2)
