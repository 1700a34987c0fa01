r"""Rules for `prod`, `vander` and cumulative products, where torch divides by the factors.

Cumulative products, and products by index, without division in any derivative.

A scan takes $\log_2 n$ steps of multiplications, so that every derivative is a sum of products.
Hillis & Steele, Data parallel algorithms (1986).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import numbers_of, with_value, with_value_of
from hodiff.corrections.rules.linalg.factored_solves import DTYPES
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_operators.table import forms_of


def scan_of_products(x: Tensor, segments: Tensor | None = None) -> Tensor:
    """Cumulative products along the last dimension, restarted at every segment (sorted numbers, shaped as x)."""
    # Powers of 2 are stored separately where a partial product may leave the range of the dtype.
    exponents = None
    if _may_overflow(x):
        # Small numbers are not scaled up further, so that tangents, and products of four, stay in the range.
        exponents, zeros = _exponents(x).clamp(min=-_range(x) // 4), (x == 0).to(torch.int32)
        x = _shifted(x, -exponents)
    n, step = x.shape[-1], 1
    while step < n:
        earlier = x[..., :-step]
        same = None if segments is None else segments[..., step:] == segments[..., :-step]
        x = torch.cat([x[..., :step], x[..., step:] * (earlier if same is None else earlier.where(same, 1))], -1)
        if exponents is not None:
            exponents, zeros = _with_earlier(exponents, step, same), _with_earlier(zeros, step, same)
            if 8 * step >= _range(x):
                more = _exponents(x)
                x, exponents = _shifted(x, -more), exponents + more
        step *= 2
    if exponents is None:
        return x
    # Derivatives of a product with two zeros are 0; without the clamp they would be 0 times an infinite power.
    return _shifted(x, torch.where(zeros < 2, exponents, exponents.clamp(max=_range(x))))


def _with_earlier(sums: Tensor, step: int, same: Tensor | None) -> Tensor:
    """Add integers of the factors that one step of the scan multiplies."""
    earlier = sums[..., :-step]
    return torch.cat([sums[..., :step], sums[..., step:] + (earlier if same is None else earlier.where(same, 0))], -1)


def product(x: Tensor) -> Tensor:
    """Product along the last dimension, by halves, or by the scan where a product of halves may overflow."""
    if x.shape[-1] < 2:  # a new tensor, because callers may change the result in place
        return x.sum(-1) if x.shape[-1] else x.new_ones(x.shape[:-1])
    if _may_overflow(x):
        return scan_of_products(x)[..., -1]
    while (n := x.shape[-1]) > 1:
        half = n // 2
        halves = x[..., :half] * x[..., half : 2 * half]
        x = torch.cat([halves, x[..., 2 * half :]], -1) if n % 2 else halves
    return x.squeeze(-1)


def products_by_index(x: Tensor, index: Tensor, target: Tensor, *, include_target: bool) -> Tensor:
    """Multiply elements with equal index along the last dimension into a target, or replace its elements."""
    places, order = index.sort(dim=-1, stable=True)
    products = scan_of_products(x.gather(-1, order), places)
    last = torch.cat([places[..., 1:] != places[..., :-1], places.new_ones(*places.shape[:-1], 1).bool()], -1)
    empty = torch.zeros_like(target)
    # Each place receives one product, so nothing is summed.
    result = empty.scatter_add(-1, places, products.where(last, 0))
    present = torch.zeros_like(target, dtype=torch.int64).scatter_add(-1, places, last.to(torch.int64)) > 0
    return (target * result if include_target else result).where(present, target)


def _may_overflow(x: Tensor) -> bool:
    """Whether a partial product may leave the range of the dtype; False if the numbers are unknown, as in a graph."""
    numbers = numbers_of(x)
    if numbers is None:
        return False
    sizes = _exponents(numbers).abs()
    largest = sizes.max() * x.shape[-1] if is_wrapped(x) else sizes.sum(-1).max()
    return bool(largest >= _range(x))


def _range(x: Tensor) -> int:
    """Largest exponent of 2 of a dtype, less a margin for a product of two."""
    return int(math.log2(torch.finfo(x.dtype).max)) - 8


def _exponents(x: Tensor) -> Tensor:
    """Exponents of 2 that scale the numbers to [1/2, 1); 0 for infinities and NaN."""
    size = x.detach().abs()
    return torch.frexp(size).exponent.where(size.isfinite(), 0)


def _shifted(x: Tensor, exponents: Tensor) -> Tensor:
    """Multiply by powers of 2, in two factors that do not overflow."""
    exponents = exponents.clamp(-2 * _range(x), 2 * _range(x))
    half = exponents // 2
    dtype = x.dtype.to_real()
    return x * half.to(dtype).exp2() * (exponents - half).to(dtype).exp2()


def _has_derivatives(*args: Any, out: Any = None, **kwargs: Any) -> bool:
    """Whether the result has derivatives: integers have exact kernels and none."""
    input = kwargs.get("input", args[0] if args else None)
    dtype = kwargs.get("dtype") or (input.dtype if isinstance(input, Tensor) else torch.int64)
    return out is None and (dtype.is_floating_point or dtype.is_complex)


_cumulative = partial(
    register,
    routes=FORWARD_INSIDE,
    reason="the forward rule divides by the factors, which may be zero",
    reference="Hillis & Steele, Data parallel algorithms (1986)",
    covers=_has_derivatives,
)


@_cumulative(*forms_of("cumprod"))
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
    return _write_products(input, dim)


_write_products = in_place(_cumprod)


@register(
    *forms_of("prod"),
    routes=ROUTES,
    reason="division by small factors overflows; third derivatives are wrong at two or more zeros",
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
    reason="it calls cumprod, whose forward rule divides by the factors",
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
    reason="it writes a cumulative product over its factors, which the backward pass needs",
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
