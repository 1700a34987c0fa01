r"""The rule for atan2, whose derivatives torch divides by $x^2 + y^2$, which overflows long before the numbers do.

Torch squares integers in their own dtype: the square of 100 in int8 is 16. The angle does not depend on a common
factor, so both arguments are divided by a constant first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED, Declined
from hodiff.corrections.registry import register
from hodiff.corrections.values import with_value
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated

_atan2_is_wrong = partial(
    register,
    routes=ROUTES,
    reason="wrong where a square leaves the range of its dtype: beyond 256 in float16, beyond 11 in int8",
    reference="the same of scaled numbers, in float32 at least",
)


@_atan2_is_wrong(torch.atan2, Tensor.atan2, torch.arctan2, Tensor.arctan2, name="torch.atan2")
def _atan2(input: Tensor, other: Tensor) -> Any:
    if not may_be_differentiated((input, other)):
        return UNNEEDED
    value = torch.atan2(input.detach(), other.detach())
    wide = torch.promote_types(value.dtype, torch.float32)
    y, x = input.to(wide), other.to(wide)
    limits = torch.finfo(wide)
    size = torch.maximum(y.detach().abs(), x.detach().abs()).clamp(4 * limits.tiny, limits.max / 4)
    return with_value(torch.atan2(y / size, x / size).to(value.dtype), value)


@_atan2_is_wrong(Tensor.atan2_, Tensor.arctan2_, name="torch.Tensor.atan2_")
def _atan2_(input: Tensor, other: Tensor) -> Any:
    result = _atan2(input.clone(), other)
    return result if isinstance(result, Declined) else input.copy_(result)
