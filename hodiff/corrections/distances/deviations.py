"""Rules for standard deviations, which are lengths: at equal numbers torch's second derivative is NaN by one route."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.distances.lengths import root
from hodiff.corrections.registry import register
from hodiff.torch_internals.differentiation import may_be_differentiated

_not_finite = partial(
    register,
    routes=("reverse-over-forward",),
    reason="the second derivative is NaN where all numbers are equal",
    reference="the root of torch.var; 0 at 0, and its even powers as powers of the variance",
)


@_not_finite(torch.std, Tensor.std, name="torch.std")
def _std(input: Tensor, *arguments: Any, **options: Any) -> Any:
    if not input.is_floating_point() or not may_be_differentiated((input,)):
        return UNNEEDED
    return root(torch.var(input, *arguments, **options))


@_not_finite(torch.std_mean)
def _std_mean(input: Tensor, *arguments: Any, **options: Any) -> Any:
    if not input.is_floating_point() or not may_be_differentiated((input,)):
        return UNNEEDED
    variance, mean = torch.var_mean(input, *arguments, **options)
    return root(variance), mean
