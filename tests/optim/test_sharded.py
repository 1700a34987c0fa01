"""Tests of optimizers on sharded models, over one, two and four ranks of a process group."""

from pathlib import Path

import pytest
import torch
from two_ranks import assert_ranks_agree


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_sharded_models_make_the_steps_of_one_process(tmp_path: Path, count: int) -> None:
    assert_ranks_agree(Path(__file__).with_name("sharded_ranks.py"), tmp_path, count)
