"""Solution of exercise 31: eight booleans in a byte, each times a power of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


class PackedLeakyRelu(Function):
    """Function $x$ or $0.1 x$, and bits that mark positive x, eight per byte. Saves the bits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value and the bits."""
        positive = x > 0
        return torch.where(positive, x, 0.1 * x), pack(positive)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save the bits."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, bits_cotangent: Any) -> Tensor:
        """Return the cotangent, or a tenth of it."""
        del bits_cotangent
        (bits,) = ctx.saved_tensors
        return torch.where(unpack(bits, cotangent), cotangent, 0.1 * cotangent)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        """Return the tangent, or a tenth of it."""
        (bits,) = ctx.saved_tensors
        return torch.where(unpack(bits, tangent), tangent, 0.1 * tangent), None


def pack(mask: Tensor) -> Tensor:
    """Pack eight booleans into each byte; the last byte is padded with zeros."""
    flat = mask.flatten().to(torch.uint8)
    full = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).reshape(-1, 8)
    return (full << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack(bits: Tensor, like: Tensor) -> Tensor:
    """Return the booleans in the shape of a tensor."""
    each = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return each.flatten()[: like.numel()].reshape(like.shape).bool()


def packed_leaky_relu(x: Tensor) -> Tensor:
    """Return the value alone."""
    return PackedLeakyRelu.apply(x)[0]
