r"""Rules for functions whose derivatives torch divides by numbers that may be 0 or overflow: sinc, atan2, logit, polar.

With $u = \pi x$ and $s(u) = \sin(u) / u$, all derivatives of sinc follow from those of $u \, s(u) = \sin(u)$,

$$ u \, s^{(n)}(u) + n \, s^{(n-1)}(u) = \sin(u + n \pi / 2), $$

and near 0, where this loses its digits, from the power series.

The derivatives of atan2 are divided by $x^2 + y^2$, which overflows long before the numbers do; and torch squares
integers in their own dtype: the square of 100 in int8 is 16. The angle does not depend on a common factor, so both
arguments are divided by a constant first.

Torch divides the second derivative of logit by x (1 - x) outside the bounds, too, and computes the derivative of polar
from the sign of the result, which is 0 at 0.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value
from hodiff.functions.logarithms import Logit
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_operators.table import forms_of


@register(
    *forms_of("logit"),
    routes=ROUTES,
    reason="with eps the second derivative is 0 / 0 at 0 and 1",
    reference="logit of the clamped argument",
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


@register(
    torch.polar,
    routes=ROUTES[:3],
    reason="the gradient of the modulus has the wrong sign if the modulus is negative, and is 0 if it is 0",
    reference="|z| cos φ + i |z| sin φ",
)
def _polar(abs: Tensor, angle: Tensor) -> Any:
    if not may_be_differentiated((abs, angle)):
        return UNNEEDED
    return torch.complex(abs * angle.cos(), abs * angle.sin())


_atan2_is_wrong = partial(
    register,
    routes=ROUTES,
    reason="wrong if a square exceeds the range of its dtype: above 256 in float16, above 11 in int8",
    reference="atan2 of scaled numbers, in float32 or wider",
)


@_atan2_is_wrong(*forms_of("atan2"))
def _atan2(input: Tensor, other: Tensor) -> Any:
    if not may_be_differentiated((input, other)):
        return UNNEEDED
    value = torch.atan2(input.detach(), other.detach())
    wide = torch.promote_types(value.dtype, torch.float32)
    y, x = input.to(wide), other.to(wide)
    limits = torch.finfo(wide)
    size = torch.maximum(y.detach().abs(), x.detach().abs()).clamp(4 * limits.tiny, limits.max / 4)
    return with_value(torch.atan2(y / size, x / size).to(value.dtype), value)


_atan2_is_wrong(*forms_of("atan2_"))(in_place(_atan2))


class SincDerivative(ElementwiseFunction):
    r"""The derivative of order n of $\sin(\pi x) / (\pi x)$, for $n = 0$ the function itself. Saves its input."""

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:
        """Compute sinc by torch's kernel, and derivatives by series and recurrence."""
        if order == 0 and not torch.compiler.is_compiling():
            return torch.sinc(x)
        return _derivative(x.to(torch.promote_types(x.dtype, torch.float32)), order).to(x.dtype)

    @staticmethod
    def slope(index: int, x: Tensor, order: int) -> Tensor:
        """Return the next derivative."""
        return SincDerivative.call(x, order + 1)


def _derivative(x: Tensor, order: int) -> Tensor:
    u = torch.pi * x
    # The recurrence multiplies errors by n! / uⁿ, which is at most about 1 beyond this radius.
    radius = max(1.5, order)
    near = u.abs() < radius
    far = _by_recurrence(torch.where(near, radius, u), order)
    return torch.pi**order * torch.where(near, _by_series(torch.where(near, u, 0), order, radius), far)


def _by_recurrence(u: Tensor, order: int) -> Tensor:
    sine, cosine = u.sin(), u.cos()
    turned = (sine, cosine, -sine, -cosine)
    s = sine / u
    for n in range(1, order + 1):
        s = (turned[n % 4] - n * s) / u
    return s


def _by_series(u: Tensor, order: int, radius: float) -> Tensor:
    r"""$\sum_k (-1)^k u^{2k - n} / ((2k + 1) (2k - n)!)$, summed from its smallest term."""
    first = (order + 1) // 2
    terms = range(first, first + _length(radius))
    square = u * u
    total = torch.zeros_like(u)
    for k in reversed(terms):
        total = total * square + (-1) ** k / ((2 * k + 1) * math.factorial(2 * k - order))
    return total * u if order % 2 else total


def _length(radius: float) -> int:
    """Number of series terms that count within a radius; four more serve derivatives taken by a compiler."""
    k, term = 0, 1.0
    while term > 1e-20:
        k += 1
        term *= radius * radius / ((2 * k) * (2 * k - 1))
    return k + 4


@register(
    *forms_of("sinc"),
    routes=ROUTES,
    reason="higher derivatives are 0 / 0 at 0, and lose digits near 0",
    reference="a power series near 0, a recurrence of the derivatives elsewhere",
)
def _sinc(input: Tensor) -> Any:
    if not (input.is_floating_point() or input.is_complex()):
        return UNNEEDED
    if input.is_complex():
        return _derivative(input, 0)
    return SincDerivative.call(input, 0)
