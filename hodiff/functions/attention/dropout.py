"""Dropout as a function of a seed and a position, so that any block of it can be recomputed at any time.

A hash of the counters replaces a generator's state: backward, every further derivative, every batch of `vmap` and every
split into blocks drop the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def kept(
    seed: Tensor, batch: Sequence[int], place: Sequence[int], size: Sequence[int], p: float, dtype: torch.dtype
) -> Tensor:
    """Draw factors (*batch, *size) of weights from row and column `place`: 0 with probability p, else 1 / (1 - p)."""
    rows, columns = (torch.arange(a, a + n, device=seed.device) for a, n in zip(place, size, strict=True))
    key = _mixed(head_keys(seed, batch) + rows[:, None])
    # Steps of the golden ratio spread neighbouring columns.
    numbers = _mixed(key + columns * 0x9E3779B9)
    return (numbers >= round(p * 2**32)).to(dtype) / (1 - p) if p < 1 else torch.zeros_like(numbers, dtype=dtype)


def head_keys(seed: Tensor, batch: Sequence[int]) -> Tensor:
    """Hash the seed into one key per head, (*batch, 1, 1)."""
    count = 1
    for each in batch:
        count *= each
    index = torch.arange(count, device=seed.device).reshape(*batch, 1, 1)
    return _mixed(_mixed(seed & _LOW) + index)


def _mixed(x: Tensor) -> Tensor:
    """Mix 32 bits, kept in 64 so that products do not lose their low half (the finalizer of MurmurHash3)."""
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)
