"""Solution of exercise 20: the slope is minus the kernel's output."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

USES_TRITON = triton is not None and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")
BLOCK = 128

if USES_TRITON:

    @triton.jit
    def decay_kernel(x_pointer, y_pointer, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has its own types
        """Compute one block per program."""
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < count
        tl.store(y_pointer + at, tl.exp(-tl.load(x_pointer + at, mask=inside)), mask=inside)


def decay(x: Tensor) -> Tensor:
    """Launch the kernel, or compute the same by torch."""
    if not USES_TRITON:
        return (-x).exp()
    x = x.contiguous()
    y = torch.empty_like(x)
    decay_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK)
    return y


class Decay(Function):
    """$e^{-x}$. Saves the output; forward mode saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Launch the kernel."""
        return decay(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Compute $-y ȳ$ from the saved output, without calling a kernel."""
        (y,) = ctx.saved_tensors
        return -y * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Call the Function, not the kernel."""
        (x,) = ctx.saved_tensors
        return -Decay.apply(x) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Decay.apply(x), in_dims[0]
