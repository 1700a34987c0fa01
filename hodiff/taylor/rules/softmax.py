"""Rules for softmax and log-sum-exp, with the largest element subtracted."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.corrections.mechanism.values import numbers_of
from hodiff.corrections.rules.elementwise.tails import LIMIT
from hodiff.taylor.jets import new_jet
from hodiff.taylor.jets_in_arguments import value_of
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame


def _shift(frame: Frame, x: Any, dim: Any) -> Any:
    """Largest element, or 0 where it is infinite; constant unless others are so far below that digits cancel."""
    value = value_of(frame, x)
    largest = torch.amax(value, dim, keepdim=True)
    plain = numbers_of(value) if value.is_cpu else None
    far = plain is not None and (plain.max() - plain.min()).item() > LIMIT
    return torch.where(torch.isfinite(largest), torch.amax(x, dim, keepdim=True) if far else largest, 0)


@rule("softmax", "nn.softmax", "_softmax")
def softmax(frame: Frame, func: Any, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Exponentials divided by their sum."""
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
    """Difference of x and its logsumexp."""
    x = input if dtype is None else input.to(dtype)
    if x.ndim == 0:
        return 0 * x
    z = x - _shift(frame, x, dim)
    return z - torch.log(torch.exp(z).sum(dim, keepdim=True))


@rule("logsumexp")
def logsumexp(frame: Frame, func: Any, input: Any, dim: Any, keepdim: bool = False, *, out: None = None) -> Any:
    """Logarithm of the sum of exponentials, with the largest element subtracted first."""
    if input.ndim == 0:
        return input + 0
    shift = _shift(frame, input, dim)
    found = torch.log(torch.exp(input - shift).sum(dim, keepdim=True)) + shift
    return found if keepdim else found.squeeze(dim)


@rule("logaddexp")
def logaddexp(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Larger argument, plus the softplus of the smaller minus the larger."""
    x, y = value_of(frame, a), value_of(frame, b)
    first = x >= y
    below: Any = torch.where(first, b - a, a - b)
    # The difference of two equal infinities counts as 0.
    apart: Any = torch.where((x == y) & torch.isinf(x), 0.0, below.value)
    moved: Any = new_jet(frame, [apart, *below.coefficients[1:]])
    return torch.where(first, a, b) - functional.logsigmoid(-moved)


@rule("logaddexp2")
def logaddexp2(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Logarithm of a sum of powers, to the base 2."""
    two = torch.log(torch.full((), 2.0, dtype=value_of(frame, a).dtype, device=value_of(frame, a).device))
    return torch.logaddexp(a * two, b * two) / two


@rule("logcumsumexp")
def logcumsumexp(frame: Frame, func: Any, x: Any, dim: int, *, out: None = None) -> Any:
    """Combine each element with the partial result 1, 2, 4, ... places before it."""
    if x.ndim == 0:
        return x
    x, step = torch.movedim(x, dim, -1), 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], torch.logaddexp(x[..., step:], x[..., :-step])], -1)
        step *= 2
    return torch.movedim(x, -1, dim)
