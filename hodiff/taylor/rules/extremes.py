"""Rules for maxima and minima, with torch's derivatives at ties."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.jets import new_jet
from hodiff.taylor.registry import rule
from hodiff.taylor.rules.arithmetic import aligned, widened
from hodiff.taylor.series import Frame, plus, times
from hodiff.taylor.substitution import value_of


def chosen(frame: Frame, value: Any, weight: Any, a: Any, b: Any) -> Any:
    """Combine the derivatives of a, weighted by `weight`, and of b, weighted by 1 - `weight`."""
    u, v = aligned(frame, a, b)
    rest = [plus(times(weight, x), times(1 - weight, y)) for x, y in zip(u[1:], v[1:], strict=True)]
    return widened(frame, [value, *rest])


def _extreme(frame: Frame, func: Any, a: Any, b: Any, sign: int) -> Any:
    x, y = value_of(frame, a), value_of(frame, b)
    value = func(x, y)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    weight = (x > y if sign > 0 else x < y).to(value.dtype) + 0.5 * (x == y).to(value.dtype)
    return chosen(frame, value, weight, a, b)


# Weight of the first argument at a tie of fmax and fmin.
_FIRST = 0.5 if torch.__version__ >= "2.14" else 1.0


@rule("fmax")
def fmax(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Maximum that ignores NaN; weights at ties depend on torch's version."""
    x, y = value_of(frame, a), value_of(frame, b)
    return _of_numbers(frame, torch.fmax(x, y), x > y, a, b)


@rule("fmin")
def fmin(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Minimum that ignores NaN; weights at ties depend on torch's version."""
    x, y = value_of(frame, a), value_of(frame, b)
    return _of_numbers(frame, torch.fmin(x, y), x < y, a, b)


def _of_numbers(frame: Frame, value: Any, is_first: Any, a: Any, b: Any) -> Any:
    x, y = value_of(frame, a), value_of(frame, b)
    weight = (is_first | torch.isnan(y)).to(value.dtype) + _FIRST * (x == y).to(value.dtype)
    return chosen(frame, value, weight, a, b)


@rule("maximum")
def maximum(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Maximum; ties take half of each derivative."""
    return _extreme(frame, func, a, b, 1)


@rule("minimum")
def minimum(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Minimum; ties take half of each derivative."""
    return _extreme(frame, func, a, b, -1)


@rule("amax", "amin")
def amax(frame: Frame, func: Any, x: Any, dim: Any = (), keepdim: bool = False, *, out: None = None) -> Any:
    """Extreme element, with the mean derivative of all elements that attain it."""
    value = func(x.value, dim, True)
    among = (x.value == value).to(x.value.dtype)
    dims = tuple(range(x.value.ndim)) if dim in ((), []) else dim
    weight = among / among.sum(dims, keepdim=True) if x.value.ndim else among
    moved = (x * weight).sum(dims, keepdim=keepdim) if x.value.ndim else x * weight
    return new_jet(frame, [func(x.value, dim, keepdim), *moved.coefficients[1:]])
