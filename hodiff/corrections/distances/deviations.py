"""Rules for standard deviations: at equal numbers torch's second derivative is NaN by one route."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.distances.lengths import root
from hodiff.corrections.registry import register
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.transforms import in_func_vmap
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms

_not_finite = partial(
    register,
    routes=("reverse-over-forward",),
    reason="the second derivative is NaN where all numbers are equal",
    reference="the root of torch.var; 0 at 0, and smooth functions of it as functions of the variance",
)


@_not_finite(torch.std, Tensor.std, name="torch.std")
def _std(input: Tensor, *arguments: Any, **options: Any) -> Any:
    if not input.is_floating_point() or not may_be_differentiated((input,)):
        return UNNEEDED
    return _deviation(input, torch.var(input, *arguments, **options), *arguments, **options)


@_not_finite(torch.std_mean)
def _std_mean(input: Tensor, *arguments: Any, **options: Any) -> Any:
    if not input.is_floating_point() or not may_be_differentiated((input,)):
        return UNNEEDED
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
