"""Torch's compiler of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx


def compile_captured(
    graph: fx.GraphModule, inputs: Sequence[Tensor], options: dict[str, Any] | None
) -> Callable[..., Any]:
    """Compile a captured graph by inductor, which takes seconds to load."""
    from torch._inductor import compile

    return compile(graph, list(inputs), options=options)
