"""Rules for sums in the log domain: `logaddexp`, `logaddexp2` and `logcumsumexp`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import result_dtype, with_value
from hodiff.functions.logistic import Logistic
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_operators.table import forms_of


class LogAddExp(ElementwiseFunction):
    r"""$\log(e^a + e^b)$, whose derivatives are $\sigma(a - b)$ and $\sigma(b - a)$. Saves its inputs."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        """Compute the value by torch's kernel."""
        return torch.logaddexp(a, b)

    @staticmethod
    def slope(index: int, a: Tensor, b: Tensor) -> Tensor:
        r"""$\sigma(a - b)$ or $\sigma(b - a)$."""
        # Two equal infinities have no difference; as the limit of equal numbers they share the derivative.
        difference = torch.where((a == b) & a.isinf(), 0, a - b)
        return Logistic.call(difference if index == 0 else -difference)


class LogAddExp2(ElementwiseFunction):
    r"""$\log_2(2^a + 2^b)$, with the slopes of `LogAddExp` at inputs in units of $\log 2$. Saves its inputs."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        """Compute the value by torch's kernel."""
        return torch.logaddexp2(a, b)

    @staticmethod
    def slope(index: int, a: Tensor, b: Tensor) -> Tensor:
        """Slope of `LogAddExp` at the scaled inputs."""
        unit = math.log(2)
        return LogAddExp.slope(index, unit * a, unit * b)


def _is_new(*_: Any, out: Any = None, **__: Any) -> bool:
    """Whether a call allocates its result; torch does not differentiate calls with `out`."""
    return out is None


def _added(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)), also of complex numbers."""
    if not (a.is_complex() or b.is_complex()):
        return LogAddExp.call(a, b)
    first = a.detach().real >= b.detach().real
    most, least = torch.where(first, a, b), torch.where(first, b, a)
    # Two equal infinities have no difference; as the limit of equal numbers they share the derivative.
    difference = least - most
    difference = with_value(difference, torch.where((a == b) & a.isinf(), 0, difference.detach()))
    return with_value(most + difference.exp().log1p(), torch.logaddexp(a.detach(), b.detach()))


def _has_kernel(*inputs: Tensor) -> bool:
    return all(each.is_floating_point() or each.is_complex() for each in inputs)


@register(
    *forms_of("logaddexp"),
    routes=("reverse-over-reverse", "reverse-over-forward"),
    reason="not finite if the difference of the terms overflows, or if both are infinite",
    reference="derivatives by the logistic function",
    covers=_is_new,
)
def _logaddexp(input: Tensor, other: Tensor) -> Any:
    if not _has_kernel(input, other):
        return UNNEEDED
    dtype = result_dtype(input, other)
    return _added(input.to(dtype), other.to(dtype))


@register(
    *forms_of("logaddexp2"),
    routes=ROUTES,
    reason="NaN if the smaller term underflows, such as 2^-150 in float32",
    reference="derivatives by the logistic function",
    covers=_is_new,
)
def _logaddexp2(input: Tensor, other: Tensor) -> Any:
    real = input.is_floating_point() and other.is_floating_point()
    # The slopes compute in the dtype of the result.
    dtype = result_dtype(input, other)
    return LogAddExp2.call(input.to(dtype), other.to(dtype)) if real else UNNEEDED


@register(
    *forms_of("logcumsumexp"),
    routes=ROUTES[1:],
    reason="derivatives lose half of their digits, and the third derivative is not finite",
    reference="a scan of logaddexp, W. D. Hillis & G. L. Steele (1986)",
    covers=_is_new,
)
def _logcumsumexp(input: Tensor, dim: int) -> Any:
    if not _has_kernel(input):
        return UNNEEDED
    if not input.dim():
        return input.clone()
    y, step = input.movedim(dim, -1), 1
    while step < y.shape[-1]:
        y = torch.cat([y[..., :step], _added(y[..., step:], y[..., :-step])], -1)
        step *= 2
    y = (y.clone() if y.shape[-1] < 2 else y).movedim(-1, dim)
    # The imaginary part may differ by a multiple of 2π.
    return with_value(y, input.detach().logcumsumexp(dim)) if input.is_complex() else y
