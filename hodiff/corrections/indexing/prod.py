"""Rules for `prod`, `vander` and cumulative products, where torch divides by the factors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.indexing.cumulative_products import product, scan_of_products
from hodiff.corrections.linalg.factored_solves import DTYPES
from hodiff.corrections.registry import register
from hodiff.corrections.values import with_value, with_value_of
from hodiff.routes import FORWARD_INSIDE, ROUTES
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


@register(
    torch.prod,
    Tensor.prod,
    name="torch.prod",
    routes=ROUTES,
    reason="divided by small factors it overflows, and two or more zeros have no right third derivative",
    reference="products of halves",
)
def _prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    if not (x.is_floating_point() or x.is_complex()) or not x.numel() or not may_be_differentiated((x,)):
        return UNNEEDED
    # 16-bit kernels accumulate in float32.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # torch accepts dimensions 0 and -1 for a scalar.
    result = product(wide.flatten() if dim is None or not x.dim() else wide.movedim(dim, -1)).to(x.dtype)
    if dim is None:
        return with_value_of(result, torch.prod, x)
    return with_value_of(result.unsqueeze(dim) if keepdim and x.dim() else result, torch.prod, x, dim, keepdim)


_SOURCE = "torch.cumprod"


@register(
    torch.linalg.vander,
    routes=FORWARD_INSIDE,
    reason="it is a cumulative product, whose forward rule divides by the factors",
    reference=_SOURCE,
)
def _linalg_vander(x: Tensor, *, N: int | None = None) -> Any:
    if x.dtype not in DTYPES:
        return UNNEEDED
    columns = x.shape[-1] if N is None and x.dim() else N
    if columns is None or columns < 2:
        return INVALID
    # Torch treats a scalar as a vector of one element.
    return _powers(torch.atleast_1d(x), columns)


@register(
    torch.vander,
    routes=ROUTES,
    reason="it is a cumulative product written into its factors, which backward then misses",
    reference=_SOURCE,
)
def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Any:
    if x.dim() != 1 or (N is not None and N < 0):
        return INVALID
    if x.dtype not in DTYPES:
        return UNNEEDED
    powers = _powers(x, len(x) if N is None else N)
    return powers if increasing else powers.flip(-1)


def _powers(x: Tensor, columns: int) -> Tensor:
    """Return the powers 0, 1, ... of each element."""
    x = x.unsqueeze(-1)
    powers = torch.ones_like(x)
    if columns > 1:
        powers = torch.cat([powers, scan_of_products(x.expand(*x.shape[:-1], columns - 1))], -1)
    return powers[..., :columns]
