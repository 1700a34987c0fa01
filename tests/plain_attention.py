"""Attention by its formula, in operators that torch differentiates correctly at every order."""

import math

import torch
from torch import Tensor


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, window: tuple[int | None, int | None] | None = None
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(E)) V; `window` is the largest distance to keys on the left and on the right."""
    apart = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    left, right = (None, None) if window is None else window
    hidden = torch.zeros_like(apart, dtype=torch.bool)
    if is_causal:
        hidden |= apart > 0
    if left is not None:
        hidden |= apart < -left
    if right is not None:
        hidden |= apart > right
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
