"""Run captured graphs without compiling them, to test their capture quickly."""

from types import ModuleType
from typing import Any

import pytest
from torch import fx


def keep_graphs(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[fx.GraphModule]:
    """Return a list of the graphs that `module` would compile; they run uncompiled."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any, **_: Any) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(module, "compile_graph", keep)
    return graphs
