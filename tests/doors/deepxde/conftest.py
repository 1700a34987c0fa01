"""DeepXDE's default dtype is torch's, too."""

from collections.abc import Iterator

import pytest
from doors.deepxde.problems import dde


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    dde.config.set_default_float("float32")
