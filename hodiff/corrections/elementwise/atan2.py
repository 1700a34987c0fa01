r"""The rule for atan2, whose derivatives torch divides by $x^2 + y^2$, which overflows long before the numbers do.

The angle does not depend on a common factor, so that both are scaled by a constant first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.corrections.values import with_value
from hodiff.routes import ROUTES
from hodiff.torch_internals.differentiation import may_be_differentiated


@register(
    torch.atan2,
    Tensor.atan2,
    torch.arctan2,
    Tensor.arctan2,
    name="torch.atan2",
    routes=ROUTES,
    reason="0 or infinite where a square overflows or underflows: beyond 256 and below 1e-3 in float16",
    reference="the same of scaled numbers, in float32 at least",
)
def _atan2(input: Tensor, other: Tensor) -> Any:
    if not (input.is_floating_point() and other.is_floating_point()) or not may_be_differentiated((input, other)):
        return UNNEEDED
    value = torch.atan2(input.detach(), other.detach())
    wide = torch.promote_types(value.dtype, torch.float32)
    y, x = input.to(wide), other.to(wide)
    limits = torch.finfo(wide)
    size = torch.maximum(y.detach().abs(), x.detach().abs()).clamp(4 * limits.tiny, limits.max / 4)
    return with_value(torch.atan2(y / size, x / size).to(value.dtype), value)
