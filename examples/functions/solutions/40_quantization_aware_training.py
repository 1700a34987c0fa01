"""Solution of exercise 40: one constant step per row, and a rounding that passes gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.functions import round_ste


def quantize_rows(w: Tensor, bits: int) -> Tensor:
    """Quantize each row on its own grid."""
    highest = 2 ** (bits - 1) - 1
    largest = w.detach().abs().amax(1, keepdim=True)
    step = torch.where(largest == 0, 1.0, largest) / highest
    return step * round_ste(w / step)
