"""The tests run in float64, which PINA takes from torch's default."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
