"""Rules for weight normalization, whose fused kernel treats the norms as constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import result_dtype
from hodiff.errors import HodiffError
from hodiff.functions.normalization.standardization import wide
from hodiff.routes import ROUTES
from hodiff.torch_internals.operators import weight_norm, weight_norm_kernel

# Torch's `dim` for the norm of all entries.
_ALL = -1
_REFERENCE = "Salimans & Kingma (2016), eq. 2"


def _is_real(v: Any, *_: Any, **__: Any) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()


def _has_kernel(v: Tensor, dim: int) -> bool:
    """Whether torch runs its kernel, which reads the norms g as a row of numbers, whatever their shape."""
    return dim in (0, v.dim() - 1) and v.dtype != torch.float16


def _norms(v: Tensor, dim: int) -> Tensor:
    """Norm of each slice along a dimension, with as many dimensions as v; for `_ALL` the norm of v, a scalar."""
    # torch.linalg.vector_norm's forward rule changes in place what a third derivative needs.
    squares = v * v
    if dim == _ALL:
        return squares.sum().sqrt()
    others = [i for i in range(v.dim()) if i != dim % v.dim()]
    # With an empty list of dimensions, torch would reduce all.
    return squares.sum(others, keepdim=True).sqrt() if others else v.abs()


@register(
    weight_norm,
    name="torch.nn.utils.parametrizations.weight_norm",
    routes=ROUTES,
    reason="second derivatives treat the norms in the gradient as constants, and there is no forward rule",
    reference=_REFERENCE,
    covers=_is_real,
)
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    if not isinstance(g, Tensor) or v.device != g.device or not -v.dim() <= dim < v.dim():
        return INVALID
    norms = _norms(wide(v), dim)
    numbers = wide(g)
    if _has_kernel(v, dim):
        if v.dtype != g.dtype:
            return INVALID
        if g.numel() != norms.numel():
            # Not declined, as torch's kernel would read past the end of g, or crash the process.
            raise HodiffError(
                f"weight_norm: g: expected one number for each of the {norms.numel()} slices of v along dimension "
                f"{dim}, got {g.numel()}; pass torch.norm_except_dim(v, 2, {dim}) or numbers of its shape."
            )
        numbers = numbers.reshape(norms.shape)
    return (wide(v) * (numbers / norms)).to(result_dtype(v, g))


@register(
    weight_norm_kernel,
    routes=ROUTES,
    reason="second derivatives treat the norms in the gradient as constants, and there is no forward rule",
    reference=_REFERENCE,
    covers=_is_real,
)
def _weight_norm_kernel(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    if not _has_kernel(v, dim):
        return INVALID
    w = _weight_norm(v, g, dim)
    return w if isinstance(w, Declined) else (w, _norms(wide(v), dim).reshape(g.shape))


@register(
    torch.norm_except_dim,
    kind="missing",
    routes=ROUTES[1:],
    reason="the forward rule for the norm of all entries returns a tangent of the wrong shape",
    reference="the square root of the sum of squares",
    covers=_is_real,
)
def _norm_except_dim(v: Tensor, pow: int = 2, dim: int = 0) -> Any:
    if dim != _ALL or pow != 2:
        return UNNEEDED
    squares = (v * v).sum()
    positive = squares > 0
    return torch.where(positive, squares, 1).sqrt() * positive  # its derivative at 0 is 0, as in torch
