"""Solution of exercise 23: one product by each rule, and two inner products that must be equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function


def transposed(function: type[Function], x: Tensor) -> bool:
    """Return True if `jvp` and `backward` of a Function of one tensor are transposes of each other at x."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(x.shape, dtype=x.dtype, generator=generator)
    y, pushed = torch.func.jvp(function.apply, (x,), (v,))[:2]
    u = torch.randn(y.shape, dtype=y.dtype, generator=generator)
    (pulled,) = torch.func.vjp(function.apply, x)[1](u)
    return bool(torch.isclose((u * pushed).sum(), (pulled * v).sum(), rtol=1e-9, atol=1e-12))
