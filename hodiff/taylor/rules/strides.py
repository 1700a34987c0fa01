"""Rule for as_strided."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.errors import InputError
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame


@rule("as_strided")
def as_strided(frame: Frame, func: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Elements at strided positions in the value's memory, which must be contiguous."""
    value = x.value
    if not value.is_contiguous() or value.storage_offset():
        raise InputError("jet: as_strided is known for contiguous tensors alone: call x.contiguous().clone() before.")
    places = torch.arange(value.numel(), device=value.device).as_strided(size, stride, storage_offset or 0)
    return torch.take(x, places)
