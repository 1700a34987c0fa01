"""Tests of optimizers over two ranks of a process group, which train one model on split batches."""

from pathlib import Path

import pytest
import torch
from two_ranks import assert_two_ranks_agree


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_ranks_make_the_steps_of_one_process(tmp_path: Path) -> None:
    assert_two_ranks_agree(Path(__file__).with_name("ranks.py"), tmp_path)
