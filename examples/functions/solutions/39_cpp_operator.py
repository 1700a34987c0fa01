"""Solution of exercise 39: an elementwise operator keeps the batch dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def batching_rule(info: Any, in_dims: tuple[int, None], x: Tensor, n: int) -> tuple[Tensor, int]:
    """Compute the whole batch at once."""
    del info
    return torch.ops.lessons.bessel(x, n), in_dims[0]
