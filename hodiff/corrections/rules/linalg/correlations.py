"""The rule for `corrcoef`, whose result torch clips to [-1, 1], as rounding may exceed 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value_of
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_operators.table import forms_of


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
