"""Softmax and logarithms of sums of exponentials, with the largest taken out."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.corrections.elementwise.tails import LIMIT
from hodiff.corrections.values import numbers_of
from hodiff.taylor.jets import new_jet
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


def _shift(frame: Frame, x: Any, dim: Any) -> Any:
    """The largest, or 0 where it is infinite; a constant unless the others are so far behind that digits cancel."""
    value = value_of(frame, x)
    largest = torch.amax(value, dim, keepdim=True)
    plain = numbers_of(value) if value.is_cpu else None
    far = plain is not None and (plain.max() - plain.min()).item() > LIMIT
    return torch.where(torch.isfinite(largest), torch.amax(x, dim, keepdim=True) if far else largest, 0)


@rule("softmax", "nn.softmax", "_softmax")
def softmax(frame: Frame, func: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Exp over its sum."""
    x = input if dtype is None else input.to(dtype)
    if x.ndim == 0:
        return torch.ones_like(value_of(frame, x)) + 0 * x
    e = torch.exp(x - _shift(frame, x, dim))
    return e / e.sum(dim, keepdim=True)


@rule("nn.softmin")
def softmin(frame: Frame, func: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Softmax of the negative."""
    return torch.softmax(-input, dim, dtype=dtype)


@rule("log_softmax", "nn.log_softmax", "_log_softmax")
def log_softmax(frame: Frame, func: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """X less logsumexp."""
    x = input if dtype is None else input.to(dtype)
    if x.ndim == 0:
        return 0 * x
    z = x - _shift(frame, x, dim)
    return z - torch.log(torch.exp(z).sum(dim, keepdim=True))


@rule("logsumexp")
def logsumexp(frame: Frame, func: Any, input: Any, dim: Any, keepdim: bool = False, *, out: None = None) -> Any:
    """The log of the sum, with the largest taken out."""
    if input.ndim == 0:
        return input + 0
    shift = _shift(frame, input, dim)
    found = torch.log(torch.exp(input - shift).sum(dim, keepdim=True)) + shift
    return found if keepdim else found.squeeze(dim)


@rule("logaddexp")
def logaddexp(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """The larger one, and softplus of how far the other is below."""
    x, y = value_of(frame, a), value_of(frame, b)
    first = x >= y
    below: Any = torch.where(first, b - a, a - b)
    # Two equal infinities count as equal numbers.
    apart: Any = torch.where((x == y) & torch.isinf(x), 0.0, below.value)
    moved: Any = new_jet(frame, [apart, *below.coefficients[1:]])
    return torch.where(first, a, b) - functional.logsigmoid(-moved)


@rule("logaddexp2")
def logaddexp2(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """As logaddexp, to the base 2."""
    two = torch.log(torch.full((), 2.0, dtype=value_of(frame, a).dtype))
    return torch.logaddexp(a * two, b * two) / two


@rule("logcumsumexp")
def logcumsumexp(frame: Frame, func: Any, x: Any, dim: int, *, out: None = None) -> Any:
    """Each with what stands 1, 2, 4, ... before it."""
    if x.ndim == 0:
        return x
    x, step = torch.movedim(x, dim, -1), 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], torch.logaddexp(x[..., step:], x[..., :-step])), -1)
        step *= 2
    return torch.movedim(x, -1, dim)
