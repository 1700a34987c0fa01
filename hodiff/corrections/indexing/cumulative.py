"""Rules for cumulative products, where torch divides by zeros."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.indexing.products import scan_of_products
from hodiff.corrections.registry import register
from hodiff.corrections.values import with_value
from hodiff.routes import FORWARD_INSIDE
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated


def _has_derivatives(*args: Any, out: Any = None, **kwargs: Any) -> bool:
    """Whether the result has derivatives: integers have exact kernels and none."""
    input = kwargs.get("input", args[0] if args else None)
    dtype = kwargs.get("dtype") or (input.dtype if isinstance(input, Tensor) else torch.int64)
    return out is None and (dtype.is_floating_point or dtype.is_complex)


_cumulative = partial(
    register,
    routes=FORWARD_INSIDE,
    reason="the forward rule divides by the factors, of which one may be zero",
    reference="Hillis & Steele, Data parallel algorithms (1986)",
    covers=_has_derivatives,
)


@_cumulative(torch.cumprod, torch.Tensor.cumprod, name="torch.cumprod")
def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    if x.dim() == 0 or not may_be_differentiated((x,)):
        return UNNEEDED
    # 16-bit kernels accumulate in float32.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    result = scan_of_products(wide.movedim(dim, -1)).movedim(-1, dim).contiguous().to(x.dtype)
    return with_value(result, x.detach().cumprod(dim))


@_cumulative(torch.Tensor.cumprod_)
def _cumprod_(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    if input.dim() == 0:
        return UNNEEDED
    if dtype not in {None, input.dtype}:
        return INVALID
    result = _cumprod(input.clone(), dim)
    return result if isinstance(result, Declined) else input.copy_(result)
