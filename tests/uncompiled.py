"""Graphs that run uncompiled, to test their capture quickly."""

from types import ModuleType
from typing import Any

import pytest
from torch import fx


def keep_graphs(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[fx.GraphModule]:
    """Return a list to which each graph is added that `module` would compile; it runs as it is."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any, **_: Any) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(module, "compile_graph", keep)
    return graphs
