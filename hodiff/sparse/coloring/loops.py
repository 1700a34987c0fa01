"""Loops over vertices: compiled, or in Python if there was no C++ compiler."""

from __future__ import annotations

from types import ModuleType

from hodiff.kernels.coloring import greedy
from hodiff.kernels.fused_library import available
from hodiff.sparse.coloring import interpreted


def loops() -> ModuleType:
    """Return the module of compiled loops if it is available, else the one in Python."""
    return greedy if available() else interpreted
