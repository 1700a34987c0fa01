"""Solution of exercise 39: an elementwise operator leaves the batch where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def batching_rule(info: Any, in_dims: tuple[int, None], x: Tensor, n: int) -> tuple[Tensor, int]:
    """The whole batch at once."""
    del info
    return torch.ops.lessons.bessel(x, n), in_dims[0]
