"""Two gloo ranks with a tensor-parallel model have the second derivatives of the whole model."""

from pathlib import Path

import pytest
import torch.distributed as dist
from two_ranks import assert_two_ranks_agree


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    assert_two_ranks_agree(Path(__file__).with_name("tensor_parallel_ranks.py"), tmp_path)
