"""Numbers and tensors in a few characters."""

from __future__ import annotations

from typing import SupportsFloat

import torch
from torch import Tensor

DIGITS = 6
LISTED = 4  # most numbers of a tensor that are shown individually


def number(value: SupportsFloat, digits: int = DIGITS) -> str:
    """Format a number with so many digits."""
    return f"{float(value):.{digits}g}"


def numbers(value: Tensor, digits: int = DIGITS) -> str:
    """Format a tensor: its numbers if they are few, else its shape and the range of its numbers."""
    flat = value.detach().reshape(-1)
    if flat.is_complex():
        return _shape(value)
    flat = flat.to("cpu", torch.float64)
    if value.dim() == 0:
        return number(flat[0], digits)
    if len(flat) <= LISTED:
        return f"[{', '.join(number(each, digits) for each in flat)}]"
    if not bool(torch.isfinite(flat).all()):
        return f"{_shape(value)}, with nan or inf among its numbers"
    return f"{_shape(value)}, from {number(flat.min(), digits)} to {number(flat.max(), digits)}"


def _shape(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
