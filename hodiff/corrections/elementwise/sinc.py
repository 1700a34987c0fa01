r"""Rule for sinc, whose derivatives torch computes by a quotient that is 0 / 0 at 0.

With $u = \pi x$ and $s(u) = \sin(u) / u$, all derivatives follow from those of $u \, s(u) = \sin(u)$,

$$ u \, s^{(n)}(u) + n \, s^{(n-1)}(u) = \sin(u + n \pi / 2), $$

and near 0, where this loses its digits, from the power series.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction


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
    torch.sinc,
    Tensor.sinc,
    torch.special.sinc,
    name="torch.sinc",
    routes=ROUTES,
    reason="higher derivatives are 0 / 0 at 0, and lose their digits near it",
    reference="power series at 0, recurrence of the derivatives beyond",
)
def _sinc(input: Tensor) -> Any:
    if not (input.is_floating_point() or input.is_complex()):
        return UNNEEDED
    if input.is_complex():
        return _derivative(input, 0)
    return SincDerivative.call(input, 0)
