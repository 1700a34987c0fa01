"""Rules for norms, standard deviations and correlations, whose derivatives at 0 and at 1 are wrong by some routes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value_of
from hodiff.corrections.rules.distances.lengths import root
from hodiff.corrections.rules.distances.p_norms import is_smooth, norm
from hodiff.corrections.rules.indexing.all_dimensions import over_all
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.transforms import in_func_vmap
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_operators.table import forms_of

_not_finite_at_equal_numbers = partial(
    register,
    routes=("reverse-over-forward",),
    reason="the second derivative is NaN if all numbers are equal",
    reference="the root of torch.var; 0 at 0, and smooth functions of it as functions of the variance",
)


@_not_finite_at_equal_numbers(*forms_of("std"))
def _std(input: Tensor, *arguments: Any, **options: Any) -> Any:
    if not may_be_differentiated((input,)):
        return UNNEEDED
    arguments, options = over_all(arguments, options)
    if not input.is_floating_point():
        return torch.std(input, *arguments, **options)
    return _deviation(input, torch.var(input, *arguments, **options), *arguments, **options)


@_not_finite_at_equal_numbers(torch.std_mean)
def _std_mean(input: Tensor, *arguments: Any, **options: Any) -> Any:
    if not may_be_differentiated((input,)):
        return UNNEEDED
    arguments, options = over_all(arguments, options)
    if not input.is_floating_point():
        return torch.std_mean(input, *arguments, **options)
    variance, mean = torch.var_mean(input, *arguments, **options)
    return _deviation(input, variance, *arguments, **options), mean


def _deviation(input: Tensor, variance: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Root of the variance, rescaled where a square would leave the range of the dtype."""
    if torch.compiler.is_compiling() or in_func_vmap() or variance.is_meta or _all(_is_in_range(variance)):
        return root(variance)
    deviation = torch.std(input.detach(), *arguments, **options)
    needed = ~_is_in_range(variance) & deviation.isfinite() & (deviation > 0)
    if _all(~needed):
        return root(variance)
    everywhere = units = torch.frexp(deviation).exponent.where(needed, 0).to(input.dtype).exp2()
    dims = options.get("dim", arguments[0] if arguments and not isinstance(arguments[0], bool) else None)
    if dims is not None and units.dim() < input.dim():
        for dim in sorted(each % input.dim() for each in ((dims,) if isinstance(dims, int) else dims)):
            everywhere = everywhere.unsqueeze(dim)
    return root(torch.var(input / everywhere, *arguments, **options)) * units


def _is_in_range(variance: Tensor) -> Tensor:
    """Mask of variances far from the limits of the dtype; 0 is excluded, as it may be an underflow."""
    ends = torch.finfo(variance.dtype)
    return (variance.detach() > ends.tiny / ends.eps) & (variance.detach() < ends.max * ends.eps)


def _all(conditions: Tensor) -> bool:
    return bool(below_transforms(conditions).all())


_not_finite = partial(
    register,
    routes=ROUTES,
    reason="at 0 second derivatives are NaN by some routes; third derivatives raise an error everywhere",
    reference="the derivatives of |x|ₚ; 0 at 0, and smooth functions of Euclidean norms as functions of their squares",
)


@_not_finite(torch.linalg.vector_norm)
def _vector_norm(
    input: Tensor, ord: float | str = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if not (input.is_floating_point() or input.is_complex()) or not may_be_differentiated((input,)):
        return UNNEEDED
    if not isinstance(ord, (int, float)):
        return INVALID
    # The norm of no elements is a constant.
    if not is_smooth(ord) or not input.numel():
        return UNNEEDED
    if dtype is not None:
        if not (dtype.is_floating_point or dtype.is_complex) or (input.is_complex() and not dtype.is_complex):
            return INVALID
        input = input.to(dtype)
    dims = _dims(dim)
    return norm(input, ord, dims, keepdim) if not dims or _fit(dims, max(input.dim(), 1)) else INVALID


def _dims(dim: Any) -> list[int] | None:
    """Return a list of dimensions, given one dimension or several."""
    if dim is None:
        return None
    try:
        return [operator.index(dim)]
    except TypeError:
        return [operator.index(each) for each in dim]


def _fit(dims: Sequence[int], n: int) -> bool:
    """Whether all dimensions exist and none is repeated."""
    return all(-n <= dim < n for dim in dims) and len({dim % n for dim in dims}) == len(dims)


@_not_finite(torch.norm, name="torch.norm")
def _norm(
    input: Tensor,
    p: float | str | None = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    if out is not None or input.layout != torch.strided or p == "nuc":
        return UNNEEDED
    return _vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


# Called by torch's own Python functions, and by exported programs.
@_not_finite(
    torch.ops.aten.norm,
    *(
        getattr(torch.ops.aten.norm, each)
        for each in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dtype", "ScalarOpt_dim_dtype")
    ),
    name="torch.ops.aten.norm",
)
def _numbered_norm(
    self: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    return _norm(self, p, dim or None, keepdim, dtype=dtype)


@_not_finite(torch.linalg.norm)
def _linalg_norm(
    A: Tensor, ord: float | None = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if ord is None:
        return _vector_norm(A, 2, dim, keepdim, dtype=dtype)
    dims = A.dim() if dim is None else len(_dims(dim) or ())
    if dims == 1:
        return _vector_norm(A, ord, dim, keepdim, dtype=dtype)
    return _matrix_norm(A, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype) if dims == 2 else INVALID


@_not_finite(torch.linalg.matrix_norm)
def _matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if ord != "fro":
        return UNNEEDED  # singular values, or maxima of sums
    if A.dim() < 2 or len(dim) != 2:
        return INVALID
    return _vector_norm(A, 2, dim, keepdim, dtype=dtype)


@_not_finite(*forms_of("dist"))
def _dist(input: Tensor, other: Tensor, p: float = 2.0) -> Any:
    return _vector_norm(input - other, p)


@_not_finite(torch.pairwise_distance, F.pairwise_distance)
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """Return the norms of x1 - x2 + eps along the last dimension, or why torch computes them."""
    return _vector_norm(x1 - x2 + eps, p, -1, keepdim)


@_not_finite(torch.cosine_similarity, F.cosine_similarity)
def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    if not dtype.is_floating_point:
        return UNNEEDED
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    units = []
    for x in (x1, x2):
        x = x.to(dtype).expand(shape)
        units.append(x / norm(x, 2, [dim], True).clamp_min(eps))
    return (units[0] * units[1]).sum(dim)


@_not_finite(F.normalize)
def _normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    if out is not None:
        return UNNEEDED
    length = _vector_norm(input, p, dim, True)
    return input / length.clamp_min(eps) if isinstance(length, Tensor) else length


@_not_finite(*forms_of("renorm"))
def _renorm(input: Tensor, p: float | str, dim: int, maxnorm: float) -> Any:
    if input.dim() < 2 or not isinstance(p, (int, float)) or maxnorm < 0:
        return INVALID
    if maxnorm == 0:
        return input * 0  # also at zeros, where torch keeps the input and its derivative
    if not is_smooth(p):
        return UNNEEDED
    others = [each for each in range(input.dim()) if each != dim % input.dim()]
    length = norm(input, p, others, True)
    # Torch adds the same 1e-7.
    return torch.where(length > maxnorm, input / (length + 1e-7) * maxnorm, input)


@register(
    *forms_of("corrcoef"),
    routes=ROUTES,
    reason="derivatives are 0 where rounding exceeds 1 and the value is clipped, as for proportional rows",
    reference="the covariances, divided by both standard deviations",
)
def _corrcoef(input: Tensor) -> Any:
    inexact = input.is_floating_point() or input.is_complex()
    # A single variable has the correlation 1.
    if not inexact or input.dim() != 2 or not may_be_differentiated((input,)):
        return UNNEEDED
    covariance = torch.cov(input)
    if not covariance.dim():
        return UNNEEDED
    deviations = covariance.diagonal().real.sqrt() if input.is_complex() else covariance.diagonal().sqrt()
    return with_value_of(covariance / deviations[:, None] / deviations, torch.corrcoef, input)
