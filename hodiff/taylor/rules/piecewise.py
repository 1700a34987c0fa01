"""Rules for piecewise functions: the value selects the piece, and joints have torch's derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.elementwise import Derivatives
from hodiff.taylor.jets import new_jet
from hodiff.taylor.jets_in_arguments import moves, value_of
from hodiff.taylor.registry import name_of, rule
from hodiff.taylor.rules.arithmetic import of_one, series_of, widened
from hodiff.taylor.series import Frame


def _slope(frame: Frame, u: Any, value: Any, slope: Any) -> Any:
    """Piecewise linear function with a given value and slope; bounds may have a higher rank than u."""
    lines = Derivatives(lambda x, m: value if m == 0 else slope if m == 1 else None)
    return widened(frame, lines.series(frame, series_of(frame, u, value.ndim)))


@rule("clamp")
def clamp(frame: Frame, func: Any, x: Any, min: Any = None, max: Any = None, *, out: None = None) -> Any:
    """Clamp with slope 1 between the bounds, including them; moving bounds replace x outside."""
    if moves(frame, min) or moves(frame, max):
        x = x if min is None else torch.where(value_of(frame, x) >= value_of(frame, min), x, min)
        return x if max is None else torch.where(value_of(frame, x) <= value_of(frame, max), x, max)
    u = x.value
    inside = torch.ones_like(u, dtype=torch.bool)
    inside = inside if min is None else inside & (u >= min)
    inside = inside if max is None else inside & (u <= max)
    return _slope(frame, x, torch.clamp(u, min, max), inside.to(u.dtype))


@rule("clamp_min")
def clamp_min(frame: Frame, func: Any, x: Any, min: Any, *, out: None = None) -> Any:
    """Clamp to a lower bound."""
    return torch.clamp(x, min=min)


@rule("clamp_max")
def clamp_max(frame: Frame, func: Any, x: Any, max: Any, *, out: None = None) -> Any:
    """Clamp to an upper bound."""
    return torch.clamp(x, max=max)


@rule("nn.hardtanh")
def hardtanh(
    frame: Frame, func: Any, x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    """Clamp with slope 1 strictly between the bounds."""
    u = x.value
    return _slope(frame, x, functional.hardtanh(u, min_val, max_val), ((u > min_val) & (u < max_val)).to(u.dtype))


@rule("nn.relu6")
def relu6(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Hardtanh from 0 to 6."""
    return functional.hardtanh(x, 0.0, 6.0)


@rule("nn.relu")
def relu(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Positive part, by torch.relu."""
    return torch.relu(x)


@rule("nn.leaky_relu")
def leaky_relu(frame: Frame, func: Any, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Piecewise linear function with two slopes."""
    u = x.value
    return _slope(
        frame, x, functional.leaky_relu(u, negative_slope), torch.where(u > 0, torch.ones_like(u), negative_slope)
    )


@rule("prelu", "nn.prelu")
def prelu(frame: Frame, func: Any, x: Any, weight: Any) -> Any:
    """Leaky ReLU with a slope that may move."""
    rank = value_of(frame, x).ndim
    slope = weight.reshape(-1, *[1] * (rank - 2)) if rank > 1 and value_of(frame, weight).numel() > 1 else weight
    return torch.where(value_of(frame, x) > 0, x, slope * x)


@rule("nn.threshold", "threshold")
def threshold(frame: Frame, func: Any, x: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    """Keep x above the threshold; a constant below."""
    return torch.where(x.value > threshold, x, torch.full((), value, dtype=x.value.dtype, device=x.value.device))


@rule("nan_to_num")
def nan_to_num(
    frame: Frame, func: Any, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None, *, out: None = None
) -> Any:
    """Keep finite numbers; constants elsewhere."""
    return torch.where(torch.isfinite(x.value), x, torch.nan_to_num(x.value, nan, posinf, neginf))


@rule("nn.hardshrink", "hardshrink")
def hardshrink(frame: Frame, func: Any, x: Any, lambd: float = 0.5) -> Any:
    """Keep x outside of [-lambd, lambd]; 0 inside."""
    u = x.value
    return _slope(frame, x, functional.hardshrink(u, lambd), ((u > lambd) | (u < -lambd)).to(u.dtype))


@rule("nn.softshrink")
def softshrink(frame: Frame, func: Any, x: Any, lambd: float = 0.5) -> Any:
    """Shrink x towards 0 by lambd: slope 1 outside of [-lambd, lambd], and 0 inside."""
    u = x.value
    return _slope(frame, x, functional.softshrink(u, lambd), ((u > lambd) | (u < -lambd)).to(u.dtype))


@rule("nn.hardsigmoid")
def hardsigmoid(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Piecewise linear sigmoid, with slope 1/6 strictly inside of [-3, 3]."""
    u = x.value
    return _slope(frame, x, functional.hardsigmoid(u), ((u > -3) & (u < 3)).to(u.dtype) / 6)


@rule("nn.hardswish")
def hardswish(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Parabola from -3 to 3, 0 below and x above."""

    def coefficient(u: Any, m: int) -> Any:
        if m == 0:
            return functional.hardswish(u)
        inside, above = (u > -3) & (u < 3), (u >= 3).to(u.dtype)
        return torch.where(inside, u / 3 + 0.5, above) if m == 1 else inside.to(u.dtype) / 6 if m == 2 else None

    return of_one(frame, x, Derivatives(coefficient))


@rule("remainder", "fmod")
def remainder(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Difference of a and a multiple of b, which is constant between jumps."""
    x, y = value_of(frame, a), value_of(frame, b)
    rounding = "floor" if name_of(func).startswith("rem") else "trunc"
    multiple = torch.div(x, y, rounding_mode=rounding)
    found = a - multiple * b
    return new_jet(frame, [func(x, y), *found.coefficients[1:]])


@rule("copysign")
def copysign(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Magnitude of a with the sign of b, which is constant."""
    value = torch.copysign(value_of(frame, a), value_of(frame, b))
    if not moves(frame, a):
        return value
    # The even powers of an absolute value are smooth at 0.
    return torch.abs(a) * torch.copysign(torch.ones_like(value), value)
