"""Rules for max pooling and unpooling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.transforms import in_func_vmap
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any

# With fewer channels, along which the kernel vectorises, the channels-last layout gains nothing.
_CHANNELS = 16


def _gains(input: Any, *arguments: Any, return_indices: bool = False, **_: Any) -> bool:
    return (
        isinstance(input, Tensor)
        and not return_indices
        and len(arguments) < 6
        and input.dtype in (torch.float32, torch.float64)
        and input.dim() == 4
        and input.shape[1] >= _CHANNELS
        and not is_batched_by_any(input)  # vmap has no such layout
    )


@register(
    torch.max_pool2d,
    F.max_pool2d,
    kind="slow",
    reason="torch's kernel is vectorised only if channels are the innermost dimension",
    covers=_gains,
    least_elements=2**16,
    devices=("cpu",),
)
def _max_pool2d(input: Tensor, *arguments: Any, return_indices: bool = False, **options: Any) -> Tensor:
    del return_indices
    # The maximum is a gather from the input, which is linear once the kernel has found the places. With channels
    # innermost, the kernel takes a third to two thirds of its time, copy included.
    with torch.no_grad():
        inner = input.detach().contiguous(memory_format=torch.channels_last)
        _, places = torch.ops.aten.max_pool2d_with_indices(inner, *_integers(*arguments, **options))
        places = places.contiguous()
    return input.flatten(-2).gather(-1, places.flatten(-2)).unflatten(-1, places.shape[-2:])


def _integers(
    kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Any, ...]:
    """Return the arguments for the operator, which accepts lists only."""
    kernel, step, margin, spread = (
        [each] * 2 if isinstance(each, int) else list(each)
        for each in (kernel_size, () if stride is None else stride, padding, dilation)
    )
    return kernel, step, margin, spread, ceil_mode


def _unpooling(function: Any, dims: int) -> Any:
    """Return a rule that runs torch's kernel on the numbers 1, 2, ... to find the element kept at each place."""

    def unpool(
        input: Tensor,
        indices: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        output_size: Any = None,
    ) -> Any:
        if not input.is_floating_point() or not may_be_differentiated((input,)):
            return UNNEEDED
        size = input.shape[-dims:]
        numbers = torch.arange(1, size.numel() + 1, dtype=torch.float64, device=input.device).reshape(size)
        layout = _layout(input, dims)
        numbers = numbers.expand(input.shape).contiguous(memory_format=layout)
        kept = function(numbers, indices, kernel_size, stride, padding, output_size).long()
        values = input.flatten(-dims).gather(-1, (kept - 1).clamp(min=0).flatten(-dims))
        result = torch.where(kept > 0, values.unflatten(-1, kept.shape[-dims:]), 0)
        return result if layout is torch.contiguous_format else result.contiguous(memory_format=layout)

    return unpool


def _layout(input: Tensor, dims: int) -> torch.memory_format:
    """Return the memory format of torch's result: for images that of the input, if it is known."""
    if dims != 2 or input.dim() != 4 or torch.compiler.is_compiling() or in_func_vmap():
        return torch.contiguous_format
    by_channels = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
    return torch.channels_last if by_channels else torch.contiguous_format


for _dims, _function in enumerate((F.max_unpool1d, F.max_unpool2d, F.max_unpool3d), start=1):
    register(
        _function,
        routes=ROUTES[:3],
        reason="at a repeated index (overlapping windows), all values get the derivative of the value that is kept",
        reference="a gather of the values that are kept",
    )(_unpooling(_function, _dims))
