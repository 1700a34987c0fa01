"""What the tests of attention share."""

import pytest

from hodiff.kernels.attention import cpu


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels were called."""
    counted = []
    kernel = cpu.attention
    monkeypatch.setattr(cpu, "attention", lambda *args: (counted.append(args[1]), kernel(*args))[1])
    return counted
