"""Rule for `polar`: torch computes its derivative from the sign of the result, which is 0 at 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated


@register(
    torch.polar,
    routes=ROUTES,
    reason="where the modulus is 0 its derivatives are 0",
    reference="|z| cos φ + i |z| sin φ",
)
def _polar(abs: Tensor, angle: Tensor) -> Any:
    if not may_be_differentiated((abs, angle)):
        return UNNEEDED
    return torch.complex(abs * angle.cos(), abs * angle.sin())
