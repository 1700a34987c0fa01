"""Quantization modules with a learned step size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.errors import InputError
from hodiff.functions.gradients.control import scale_gradient
from hodiff.functions.gradients.quantization import quantize_ste


class FakeQuantize(nn.Module):
    r"""Uniform quantization by `hodiff.functions.quantize_ste`, with a learned step size.

    The gradient of the step size is scaled by $1 / \sqrt{N q_+}$ for N numbers in the input, so that the step size
    changes at the pace of the weights.

    Args:
        bits: Number of bits.
        symmetric: Whether the integers lie around zero, as for weights; else they start from zero, as for nonnegative
            activations.
        scale: Initial step size; `initialize_` sets it from data.
        learnable: Whether the step size is a parameter; else it is a buffer.
        device: Device of the step size.
        dtype: Dtype of the step size.

    Attributes:
        scale: The step size.

    Raises:
        InputError: If `bits` or `scale` is invalid.

    Example:
        >>> import torch
        >>> quantize = FakeQuantize(bits=3)
        >>> weights = torch.tensor([-2.0, -0.3, 0.4, 0.9])
        >>> quantize.initialize_(weights)
        FakeQuantize(bits=3, symmetric=True)
        >>> quantize(weights)
        tensor([-2.0785,  0.0000,  0.0000,  1.0392], grad_fn=<QuantizeSTEBackward>)

    Source: S. K. Esser, J. L. McKinstry, D. Bablani, R. Appuswamy & D. S. Modha, "Learned step size quantization",
    2020, sections 2.1 and 2.2.
    """

    scale: Tensor

    def __init__(
        self,
        bits: int,
        *,
        symmetric: bool = True,
        scale: float = 1.0,
        learnable: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        quantize_ste(torch.zeros(()), bits, scale=scale, symmetric=symmetric)  # raises on bad arguments
        self.bits, self.symmetric = bits, symmetric
        initial = torch.tensor(float(scale), device=device, dtype=dtype or torch.get_default_dtype())
        if learnable:
            self.scale = nn.Parameter(initial)
        else:
            self.register_buffer("scale", initial)

    @property
    def highest(self) -> int:
        """The highest integer, $q_+$."""
        return 2 ** (self.bits - self.symmetric) - 1

    @torch.no_grad()
    def initialize_(self, x: Tensor) -> FakeQuantize:
        r"""Set the step size to $2 \overline{|x|} / \sqrt{q_+}$.

        Args:
            x: Sample of the numbers to be quantized, not all zero.

        Returns:
            This module.

        Raises:
            InputError: If the step size is not a positive number.
        """
        scale = 2 * x.abs().mean() / math.sqrt(self.highest)
        if not 0 < float(scale) < math.inf:
            raise InputError(f"FakeQuantize: x: expected finite numbers that are not all zero, got mean |x| {scale}.")
        self.scale.copy_(scale)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Quantize the input."""
        if torch.compiler.is_compiling():
            # A symbolic size has no numeric square root, and most sizes exceed the range of float16.
            wide = torch.promote_types(self.scale.dtype, torch.float32)
            factor = torch.full((), x.numel(), dtype=wide, device=self.scale.device).clamp(min=1).mul(self.highest)
            scale = scale_gradient(self.scale.to(wide), factor.rsqrt()).to(self.scale.dtype)
        else:
            scale = scale_gradient(self.scale, 1 / math.sqrt(max(x.numel(), 1) * self.highest))
        return quantize_ste(x, self.bits, scale=scale, symmetric=self.symmetric)

    def extra_repr(self) -> str:
        """Return the grid."""
        return f"bits={self.bits}, symmetric={self.symmetric}"
