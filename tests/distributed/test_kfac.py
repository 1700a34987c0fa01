"""K-FAC of sharded models and of replicas with split data equals that of one process."""

from pathlib import Path

import pytest
import torch.distributed as dist
from two_ranks import assert_ranks_agree


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_agree_with_one_process(tmp_path: Path, count: int) -> None:
    assert_ranks_agree(Path(__file__).with_name("kfac_ranks.py"), tmp_path, count)
