"""A fixture for tests of compiled products."""

import warnings
from collections.abc import Iterator

import pytest
from torch import fx
from uncompiled import keep_graphs

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.operators.compiled import product_graphs


@pytest.fixture
def captured_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.GraphModule]]:
    """Run the graphs uncompiled, and raise if capture fails."""
    graphs = keep_graphs(monkeypatch, product_graphs)
    with silence_torch_warnings(), warnings.catch_warnings():
        warnings.simplefilter("error", hodiff.HodiffWarning)
        yield graphs
