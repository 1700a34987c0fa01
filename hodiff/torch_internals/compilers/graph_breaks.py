"""Where `torch.compile` may not break its graph."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def in_one_graph() -> AbstractContextManager[Any]:
    """Code in which a break of the graph is an error; only to be asked for while a compiler traces."""
    return torch._dynamo.error_on_graph_break(True)
