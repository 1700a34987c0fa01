r"""Lengths (p-norms) of vectors, with all derivatives 0 where the vector is 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.distances.squares import remembered, squared


def root(square: Tensor, dtype: torch.dtype | None = None, *, of: Tensor | None = None, how: Any = None) -> Tensor:
    """Return the square root, with all derivatives 0 at 0, and remember the square for functions of the root."""
    zero = square == 0
    length = torch.where(zero, 0, torch.where(zero, 1, square).sqrt())
    if dtype is None or dtype == length.dtype:
        return remembered(length, lambda: square, (square,), of=of, how=how)
    return remembered(length.to(dtype), lambda: square.to(dtype), (square,), of=of, how=how)


def norm(x: Tensor, p: float, dims: Sequence[int] | None, keepdim: bool) -> Tensor:
    """Return the p-norm of some dimensions, for 1 < p < ∞.

    Args:
        x: Numbers, perhaps complex.
        p: The order.
        dims: The dimensions of the vectors; None for all.
        keepdim: Whether the reduced dimensions remain, of size 1.

    Returns:
        The norms.
    """
    dtype = x.real.dtype if x.is_complex() else x.dtype
    of, how = x, (p, None if dims is None else tuple(dims), keepdim)
    if x.dim() == 0:
        return norm(x.unsqueeze(0), p, [0], False)
    dims = list(range(x.dim())) if not dims else [dim % x.dim() for dim in dims]
    if x.is_complex():
        x = x.resolve_conj()  # vmap has no rule for the imaginary part of a view that is conjugated
        squares = x.real.square() + x.imag.square()
        x = squares if p == 2 else root(squares)
    else:
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # as kernels for 16 bits accumulate
        x = squared(x) if p == 2 else x
    if p == 2:
        return root(x.sum(dims, keepdim), dtype, of=of, how=how)
    last = x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    length = rows_norm(last, p).to(dtype)
    if keepdim:
        for dim in sorted(dims):
            length = length.unsqueeze(dim)
    return length


def rows_norm(x: Tensor, p: float) -> Tensor:
    """Return the p-norm of the last dimension of a real tensor; derivatives at 0 are 0."""
    if p == 2:
        return root(x.square().sum(-1))
    # Powers of large and small numbers, and their derivatives, would leave the range of the dtype.
    unit = _magnitude(x.detach())
    x = x / unit[..., None]
    zero = x == 0
    total = (x ** int(p) if p % 2 == 0 else torch.where(zero, 0, torch.where(zero, 1, x).abs() ** p)).sum(-1)
    zero = total == 0
    return unit * torch.where(zero, 0, torch.where(zero, 1, total) ** (1 / p))


def _magnitude(rows: Tensor) -> Tensor:
    """Largest absolute value of each row, clamped to the range of the dtype."""
    if not rows.shape[-1]:
        return rows.new_ones(rows.shape[:-1])
    numbers = torch.finfo(rows.dtype)
    return rows.abs().amax(-1).clamp(numbers.tiny, numbers.max)


def is_smooth(p: float) -> bool:
    """Whether the p-norm has a rule here: other orders are sums, maxima or counts of elements."""
    return 1 < p < math.inf
