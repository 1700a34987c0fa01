"""Rules for pooling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.registry import register

# Below this number of channels, which are what the kernel's vectors run along, the other layout gains nothing.
_CHANNELS = 16


def _gains(input: Any, *arguments: Any, return_indices: bool = False, **_: Any) -> bool:
    return (
        isinstance(input, Tensor)
        and not return_indices
        and len(arguments) < 6
        and input.dtype in (torch.float32, torch.float64)
        and input.device.type == "cpu"
        and input.dim() == 4
        and input.shape[1] >= _CHANNELS
    )


@register(
    torch.max_pool2d,
    F.max_pool2d,
    name="torch.nn.functional.max_pool2d",
    kind="slow",
    reason="torch's kernel is not vectorised unless channels are the innermost dimension",
    covers=_gains,
    least_elements=2**16,
)
def _max_pool2d(input: Tensor, *arguments: Any, return_indices: bool = False, **options: Any) -> Tensor:
    del return_indices
    # The maximum is one of the inputs: a gather, which is linear once the kernel has said where. That kernel takes a
    # third to two thirds of its time, copy included, where channels are the innermost dimension.
    with torch.no_grad():
        inner = input.detach().contiguous(memory_format=torch.channels_last)
        _, places = torch.ops.aten.max_pool2d_with_indices(inner, *_integers(*arguments, **options))
        places = places.contiguous()
    return input.flatten(-2).gather(-1, places.flatten(-2)).unflatten(-1, places.shape[-2:])


def _integers(
    kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Any, ...]:
    """The arguments as the operator takes them, which knows no single numbers."""
    kernel, step, margin, spread = (
        [each] * 2 if isinstance(each, int) else list(each)
        for each in (kernel_size, () if stride is None else stride, padding, dilation)
    )
    return kernel, step, margin, spread, ceil_mode
