"""Rule for logit with bounds: torch divides its second derivative by x (1 - x) outside the bounds, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.functions.logarithms import Logit
from hodiff.routes import ROUTES


@register(
    torch.logit,
    Tensor.logit,
    torch.special.logit,
    name="torch.logit",
    routes=ROUTES,
    reason="with eps the second derivative is 0 / 0 at 0 and 1",
    reference="that of the bounded argument",
)
def _logit(input: Tensor, eps: float | None = None) -> Any:
    if not input.is_floating_point():
        return UNNEEDED
    if eps is None:
        return Logit.call(input)  # whose derivatives overflow to infinities, not to NaN
    inside = ~((input < eps) | (input > 1 - eps))  # true for NaN as well
    # The value is constant outside the bounds, so 0.5 replaces the input there.
    bounded = torch.where(inside, input, 0.5).logit()
    return torch.where(inside, bounded, input.detach().logit(eps))
