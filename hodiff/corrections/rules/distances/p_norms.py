"""Values of p-norms whose derivatives of any order are 0 at 0 and stay in the range of the dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.corrections.mechanism.values import numbers_of
from hodiff.corrections.rules.distances.lengths import find, remembered, root, squared
from hodiff.torch_internals.autograd.wrapped_tensors import any_holds

# Power of the dtype's range within which norms are computed from the sum of squares.
_INSIDE = 0.45


def norm(x: Tensor, p: float, dims: Sequence[int] | None, keepdim: bool) -> Tensor:
    """Return the p-norm of some dimensions, or of all, of real or complex numbers, for 1 < p < ∞."""
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
        square = x.sum(dims, keepdim)
        length = None if find(of) else _rescaled(of, square, dims, keepdim)
        if length is None:
            return root(square, dtype, of=of, how=how)
        return remembered(length.to(dtype), lambda: square.to(dtype), (square,), of=of, how=how)
    last = x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    length = rows_norm(last, p).to(dtype)
    if keepdim:
        for dim in sorted(dims):
            length = length.unsqueeze(dim)
    return length


def _rescaled(x: Tensor, square: Tensor, dims: list[int], keepdim: bool) -> Tensor | None:
    """Return the Euclidean norm of rows in units of their size if powers of the square may leave the dtype's range."""
    # The second derivative of the root has the third power of the norm, and cotangents may have further powers.
    # On a CPU only, as other devices would have to synchronize; float64 has the range.
    checked = square.is_cpu and square.dtype != torch.float64 and x.numel()
    plain = numbers_of(square) if checked else None
    if plain is None:
        return None
    ends = torch.finfo(square.dtype)
    least, most = ends.tiny**_INSIDE, ends.max**_INSIDE
    low, high = plain.aminmax()
    if low.item() > least and high.item() < most:
        return None
    inner = square.detach()
    far = ~((inner > least) & (inner < most)) & ~inner.isnan()
    parts = [x.real, x.imag] if x.is_complex() else [x.to(square.dtype)]
    size = torch.stack([part.detach().abs().amax(dims, True) for part in parts]).amax(0)
    inner, far = (each.reshape(size.shape) for each in (inner, far))
    # Keep torch's values where the sum of squares is not finite or vanishes.
    if any_holds((size > 0) & ((inner == 0) | inner.isinf())) or not any_holds((size > 0) & far):
        return None
    unit = torch.where((size > 0) & size.isfinite(), torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent), 1)
    total = torch.stack([(part / unit).square() for part in parts]).sum(0).sum(dims, keepdim)
    zero = total == 0
    return (unit if keepdim else unit.reshape(total.shape)) * torch.where(zero, 0, torch.where(zero, 1, total).sqrt())


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
