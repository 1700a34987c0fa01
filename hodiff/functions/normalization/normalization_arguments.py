"""Argument checks of normalizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_number
from hodiff.errors import InputError
from hodiff.rules.arguments import dtype_name, require_floating


def require_channels(function: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """Raise if the arguments do not suit a normalization of the channels of an input (N, C, ...)."""
    require_floating(function, x=x)
    if x.dim() < 2:
        raise InputError(f"{function}: x: expected at least the two dimensions (N, C, ...), got {tuple(x.shape)}.")
    require_parameters(function, x, (x.shape[1],), weight, bias)
    require_eps(function, eps)


def require_parameters(function: str, x: Tensor, shape: tuple[int, ...], weight: Any, bias: Any) -> None:
    """Raise if the weight or the bias has another shape than the given one, or a dtype that does not fit x."""
    if weight is None and bias is None:
        return
    dtypes = {x.dtype, torch.float32} if x.dtype in {torch.float16, torch.bfloat16} else {x.dtype}
    given = {name: each for name, each in (("weight", weight), ("bias", bias)) if each is not None}
    require_floating(function, **given)
    for name, each in given.items():
        if tuple(each.shape) != shape or each.dtype not in dtypes:
            raise InputError(
                f"{function}: {name}: expected {shape} {dtype_name(x)}, "
                f"got {tuple(each.shape)} {dtype_name(each)}; {name}.to(x.dtype) converts it."
            )
    if len({each.dtype for each in given.values()}) > 1:
        raise InputError(
            f"{function}: bias: expected the dtype of weight, {dtype_name(given['weight'])}, "
            f"got {dtype_name(given['bias'])}; bias.to(weight.dtype) converts it."
        )


def require_running(function: str, x: Tensor, mean: Any, variance: Any, *, required: bool) -> None:
    """Raise if running statistics are missing, or do not fit the channels of x (N, C, ...)."""
    for name, each in (("running_mean", mean), ("running_var", variance)):
        if each is None:
            if required:
                raise InputError(
                    f"{function}: {name}: expected a tensor ({x.shape[1]},), got None; pass running statistics, or "
                    "normalize by the statistics of the input."
                )
            continue
        require_floating(function, **{name: each})
        if tuple(each.shape) != (x.shape[1],):
            raise InputError(f"{function}: {name}: expected shape ({x.shape[1]},), got {tuple(each.shape)}.")


def require_several(function: str, x: Tensor, count: int, unit: str) -> None:
    """Raise if the statistics of a `unit` are taken over one value; `count` is the number of values."""
    if count == 1:
        raise InputError(
            f"{function}: x: expected more than one value for each {unit}, got {tuple(x.shape)}; "
            "the variance of one value is zero. Use running statistics."
        )


def require_eps(function: str, eps: float) -> None:
    """Raise if `eps` is not a number."""
    # A negative eps is valid as long as the sum is positive, and torch accepts it.
    require_number(function, "eps", eps)
