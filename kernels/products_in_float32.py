"""Products of 16-bit matrices with sums and results in float32, by units of a device that multiply 16 bits.

A product of two 16-bit numbers is exact in float32, so such units lose nothing if both factors have 16 bits anyway. A
factor that was computed in float32 has to be rounded first. To bfloat16 this changes each number by at most one part in
512, and sums average these changes; float16 would make zeros of small numbers, as gradients of a mean often are.
"""

from __future__ import annotations

import torch
from torch import Tensor

NARROW = frozenset({torch.float16, torch.bfloat16})
# Dtypes that units of a device multiply with sums and results in float32, and whether computed factors are rounded to
# them. Torch has such products on CUDA from version 2.8 on; elsewhere, 16-bit factors are converted to float32.
UNITS: dict[tuple[str, torch.dtype], bool] = (
    {} if torch.version.hip else {("cuda", torch.bfloat16): True, ("cuda", torch.float16): False}
)


def wide(t: Tensor) -> Tensor:
    """Convert 16-bit numbers to float32."""
    return t.float() if t.dtype in NARROW else t


def factor(t: Tensor) -> Tensor:
    """Return a factor of products: 16-bit numbers as they are if the device multiplies them, else in float32."""
    return t if (t.device.type, t.dtype) in UNITS else wide(t)


def is_rounded(like: Tensor) -> bool:
    """Whether computed factors are rounded to the dtype of the other factor."""
    return UNITS.get((like.device.type, like.dtype), False)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b` for matrices, in float32 or wider; `UNITS` tells whether a float32 factor is rounded."""
    narrow = a if a.dtype in NARROW else b
    chosen = UNITS.get((narrow.device.type, narrow.dtype))
    if chosen is None or not (chosen or a.dtype is b.dtype) or not a.shape[1]:
        return wide(a) @ wide(b)
    return multiply(a.to(narrow.dtype), b.to(narrow.dtype))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply 16-bit matrices of one dtype, with sums and result in float32; only on devices in `UNITS`."""
    result: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return result
