"""Characteristic sizes of unknowns, as `least_squares` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import is_number
from hodiff.errors import InputError
from hodiff.optim.variables import Variables


def scales_of(x_scale: Any, variables: Variables) -> Any:
    """Validate `x_scale` and return it in SciPy's form."""
    if isinstance(x_scale, str) and x_scale == "jac":
        return x_scale
    if is_number(x_scale):
        _require_positive(float(x_scale))
        return x_scale
    if isinstance(x_scale, str):
        raise InputError(
            f"least_squares: x_scale: expected a number, 'jac', a pytree like x0 or None, got {x_scale!r}."
        )
    scales = variables.array(variables.flatten(x_scale, "least_squares", "x_scale"))
    _require_positive(float(scales.min()))
    return scales


def _require_positive(least: float) -> None:
    if not least > 0:
        raise InputError(f"least_squares: x_scale: expected positive numbers, got {least:g} among them.")


def scale_vector(x_scale: Any, variables: Variables) -> Tensor | None:
    """Return scales for "lm-geodesic", by default 1; None to compute them from the Jacobian's columns."""
    scales = scales_of(1.0 if x_scale is None else x_scale, variables)
    if isinstance(scales, str):
        return None
    return torch.as_tensor(scales, device="cpu").to(variables.origin).expand(variables.space.size)
