"""Reductions of losses, by torch's names and by the numbers of its compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

REDUCE: dict[Any, Callable[[Tensor], Tensor]] = {"none": lambda each: each, "mean": torch.mean, "sum": torch.sum}
REDUCE |= dict(enumerate(REDUCE.values()))

# Reason to decline a call with deprecated arguments.
DEPRECATED = "size_average and reduce are deprecated, and only torch remembers what they mean"
