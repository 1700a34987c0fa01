r"""Rules for cumulative products and products of what shares an index, where torch divides by zeros.

A scan in $\log_2 n$ steps of multiplications, so that every derivative is made of products, as it should be.
Hillis & Steele, Data parallel algorithms (1986).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED
from hodiff.corrections.registry import register
from hodiff.routes import FORWARD_INSIDE


def scan_of_products(x: Tensor, segments: Tensor | None = None) -> Tensor:
    """Cumulative products along the last dimension, begun anew with every segment (sorted numbers, shaped as x)."""
    n, step = x.shape[-1], 1
    while step < n:
        head, tail = x[..., :step], x[..., step:]
        earlier = x[..., :-step]
        if segments is not None:
            earlier = earlier.where(segments[..., step:] == segments[..., :-step], 1)
        x = torch.cat([head, tail * earlier], -1)
        step *= 2
    return x


def products_by_index(x: Tensor, index: Tensor, target: Tensor, *, include_target: bool) -> Tensor:
    """Multiply what shares an index along the last dimension into a target, or put the products in its places."""
    places, order = index.sort(dim=-1, stable=True)
    products = scan_of_products(x.gather(-1, order), places)
    last = torch.cat([places[..., 1:] != places[..., :-1], places.new_ones(*places.shape[:-1], 1).bool()], -1)
    empty = torch.zeros_like(target)
    # One product is left for each place, and nothing is added to it.
    result = empty.scatter_add(-1, places, products.where(last, 0))
    present = torch.zeros_like(target, dtype=torch.int64).scatter_add(-1, places, last.to(torch.int64)) > 0
    return (target * result if include_target else result).where(present, target)


def _has_derivatives(*args: Any, out: Any = None, **kwargs: Any) -> bool:
    """Integers have exact kernels and no derivatives."""
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
    if x.dim() == 0:
        return UNNEEDED
    # Kernels for 16 bits accumulate in more.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    result = scan_of_products(wide.movedim(dim, -1)).movedim(-1, dim).contiguous().to(x.dtype)
    # What is changed in place afterwards must not be the input.
    return result.clone() if x.shape[dim] < 2 else result


@_cumulative(torch.Tensor.cumprod_)
def _cumprod_(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    if input.dim() == 0:
        return UNNEEDED
    if dtype not in {None, input.dtype}:
        return INVALID
    return input.copy_(_cumprod(input.clone(), dim))
