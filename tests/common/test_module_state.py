"""Buffers during and after a run that changes them, against copies made before the run."""

import pytest
import torch

from hodiff.common.module_state import exchanged_buffers, untouched_buffers


def test_untouched_buffers_are_copies_in_training():
    norm = torch.nn.BatchNorm1d(3)
    held, before = norm.running_mean, norm.running_mean.clone()
    with untouched_buffers([norm]):
        norm(torch.randn(5, 3) + 7)
        assert not torch.allclose(norm.running_mean, before)
    assert norm.running_mean is held
    assert torch.equal(held, before)


def test_untouched_buffers_are_not_copied_in_evaluation():
    norm = torch.nn.BatchNorm1d(3).eval()
    held = norm.running_mean
    with untouched_buffers([norm]):
        assert norm.running_mean is held


def test_buffers_are_restored_after_an_error():
    norm = torch.nn.BatchNorm1d(3)
    held, other = norm.running_var, torch.zeros(3)

    def fail():
        with exchanged_buffers([(norm._buffers, "running_var", other)]):
            assert norm.running_var is other
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert norm.running_var is held
