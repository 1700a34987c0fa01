"""The rule for scattering by strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, unable
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES


@register(
    torch.as_strided_scatter,
    torch.Tensor.as_strided_scatter,
    name="torch.as_strided_scatter",
    routes=ROUTES,
    reason="the gradient, too, is wrong where all of the input is written over",
    reference="torch.scatter at the places that the strides name",
)
def _as_strided_scatter(
    input: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    if input.dtype != src.dtype or src.shape != torch.Size(size):
        return INVALID
    if not input.is_contiguous() or _meet(size, stride):
        return unable("the storage is no row of numbers, or a place in it is written to twice")
    start = 0 if storage_offset is None else storage_offset - int(input.storage_offset())
    places = torch.tensor(start, device=input.device)
    for n, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + step * torch.arange(n, device=input.device)
    return input.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1)).reshape(input.shape)


def _meet(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two indices may name one place."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False
