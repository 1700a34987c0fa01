"""Regions in which `torch.compile` must not break its graph."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def in_one_graph() -> AbstractContextManager[Any]:
    """Return a context in which a graph break is an error; call it only while a compiler traces."""
    return torch._dynamo.error_on_graph_break(True)
