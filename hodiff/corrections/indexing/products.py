r"""Products of what comes before, and of what shares an index, by which no derivative divides.

A scan in $\log_2 n$ steps of multiplications, so that every derivative is made of products, as it should be.
Hillis & Steele, Data parallel algorithms (1986).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hodiff.corrections.values import numbers_of
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped


def scan_of_products(x: Tensor, segments: Tensor | None = None) -> Tensor:
    """Cumulative products along the last dimension, begun anew with every segment (sorted numbers, shaped as x)."""
    # Powers of 2 are kept apart where a partial product may leave the range of the dtype.
    exponents = None
    if _may_overflow(x):
        # A tangent, and the product of four, has to stay in the range when its number is made larger.
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
    # The derivatives of a product with two zeros are 0, and would be 0 times the infinite power.
    return _shifted(x, torch.where(zeros < 2, exponents, exponents.clamp(max=_range(x))))


def _with_earlier(sums: Tensor, step: int, same: Tensor | None) -> Tensor:
    """Whole numbers, added up as the factors are multiplied."""
    earlier = sums[..., :-step]
    return torch.cat([sums[..., :step], sums[..., step:] + (earlier if same is None else earlier.where(same, 0))], -1)


def product(x: Tensor) -> Tensor:
    """The product of the last dimension, half by half, or as the last of the cumulative ones where halves overflow."""
    if x.shape[-1] < 2:  # what is changed in place afterwards must not be the input
        return x.sum(-1) if x.shape[-1] else x.new_ones(x.shape[:-1])
    if _may_overflow(x):
        return scan_of_products(x)[..., -1]
    while (n := x.shape[-1]) > 1:
        half = n // 2
        halves = x[..., :half] * x[..., half : 2 * half]
        x = torch.cat([halves, x[..., 2 * half :]], -1) if n % 2 else halves
    return x.squeeze(-1)


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


def _may_overflow(x: Tensor) -> bool:
    """Whether a product of neighbours may leave the range of the dtype; a graph, without numbers, is trusted."""
    numbers = numbers_of(x)
    if numbers is None:
        return False
    sizes = _exponents(numbers).abs()
    largest = sizes.max() * x.shape[-1] if is_wrapped(x) else sizes.sum(-1).max()
    return bool(largest >= _range(x))


def _range(x: Tensor) -> int:
    """The largest power of 2 of a dtype, less some for a product of two."""
    return int(math.log2(torch.finfo(x.dtype).max)) - 8


def _exponents(x: Tensor) -> Tensor:
    """Such that a number is a half to one times 2 to this power; 0 of what is infinite, or no number."""
    size = x.detach().abs()
    return torch.frexp(size).exponent.where(size.isfinite(), 0)


def _shifted(x: Tensor, exponents: Tensor) -> Tensor:
    """The numbers times powers of 2, by two factors of which neither overflows."""
    exponents = exponents.clamp(-2 * _range(x), 2 * _range(x))
    half = exponents // 2
    dtype = x.dtype.to_real()
    return x * half.to(dtype).exp2() * (exponents - half).to(dtype).exp2()
