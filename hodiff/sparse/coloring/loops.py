"""The loops over vertices: compiled, or in Python where no C++ compiler was."""

from __future__ import annotations

from types import ModuleType

from hodiff.kernels.coloring import greedy
from hodiff.kernels.fused_library import available
from hodiff.sparse.coloring import interpreted


def loops() -> ModuleType:
    """The module whose functions are called; both have the same ones."""
    return greedy if available() else interpreted
