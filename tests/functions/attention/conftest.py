"""Fixtures for the tests of attention."""

import pytest

from hodiff.kernels.attention import cpu


@pytest.fixture
def calls(monkeypatch):
    """Record every call of the CPU kernels."""
    counted = []
    kernel = cpu.attention
    monkeypatch.setattr(cpu, "attention", lambda *args: (counted.append(args[1]), kernel(*args))[1])
    return counted
