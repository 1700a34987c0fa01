"""Sequences in the formulas of test problems, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def count(n: int, first: int = 1) -> Tensor:
    """Return n consecutive integers from `first`."""
    return torch.arange(first, first + n, dtype=torch.float64)


def inner_points(n: int) -> Tensor:
    """Return the points that divide the unit interval into n + 1 parts."""
    return count(n) / (n + 1)


def series(text: str) -> Tensor:
    """Parse the numbers of a text."""
    return torch.tensor([float(each) for each in text.split()], dtype=torch.float64)
