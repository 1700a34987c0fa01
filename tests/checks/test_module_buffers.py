"""Running statistics after calls at infinity, against the statistics before."""

import torch
from torch import nn

from hodiff.checks import check
from hodiff.checks.module_buffers import buffers_put_back


def test_running_statistics_are_restored():
    norm = nn.BatchNorm1d(3).double()
    within = nn.Sequential(nn.Linear(3, 3).double(), norm)
    with buffers_put_back():
        within(torch.full((4, 3), torch.inf, dtype=torch.float64))
        assert norm.running_mean.isnan().any()
    assert torch.equal(norm.running_mean, torch.zeros(3, dtype=torch.float64))
    assert norm.num_batches_tracked == 0
    check(lambda x: within(x).sin(), torch.randn(4, 3, dtype=torch.float64), order=1, vmap=False, scipy=False)
    assert norm.running_mean.isfinite().all()
