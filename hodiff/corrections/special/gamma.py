r"""Rules for derivatives of the incomplete gamma functions and Hurwitz's zeta function by their argument.

Derivatives by the order a or s have no closed form: the rules raise torch's own error for them.

$$ \frac{d}{dx} P(a, x) = g(a, x) = \frac{x^{a-1} e^{-x}}{Γ(a)}, \qquad \frac{dg}{dx} = g(a-1, x) - g(a, x), \qquad
   \frac{d}{dx} ζ(s, x) = -s\,ζ(s+1, x). $$
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.corrections.special.towers import enter
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated


class GammaDensity(ElementwiseFunction):
    r"""$x^{a-1} e^{-x} / Γ(a)$. Saves its inputs."""

    @staticmethod
    def forward(a: Tensor, x: Tensor) -> Tensor:
        """Compute the density by logarithms, as its factors overflow earlier; 0 at the poles of Γ."""
        scale = torch.lgamma(a)
        size = torch.exp(torch.xlogy(a - 1, x) - x - scale)
        odd = (a < 0) & (torch.remainder(a.floor(), 2) == 1)
        return torch.where(scale.isinf() & (a <= 0), 0, torch.where(odd, -size, size))

    @staticmethod
    def slope(index: int, a: Tensor, x: Tensor) -> Tensor:
        r"""$g(a-1, x) - g(a, x)$ by x; $g(a, x) (\log x - ψ(a))$ by a."""
        here = GammaDensity.call(a, x)
        if index:
            return GammaDensity.call(a - 1, x) - here
        return torch.where(x == 0, 0, here * (torch.log(torch.where(x == 0, 1, x)) - torch.digamma(a)))


class LowerGamma(ElementwiseFunction):
    """P(a, x), the lower incomplete gamma function over Γ(a). Saves its inputs."""

    @staticmethod
    def forward(a: Tensor, x: Tensor) -> Tensor:
        """Compute the value by torch's kernel."""
        return torch.special.gammainc(a, x)

    @staticmethod
    def slope(index: int, a: Tensor, x: Tensor) -> Tensor | float:
        """The density by x; `_with_refusal` raises for the derivative by a."""
        return GammaDensity.call(a, x) if index else 0.0


class UpperGamma(ElementwiseFunction):
    """1 - P(a, x). Saves its inputs."""

    @staticmethod
    def forward(a: Tensor, x: Tensor) -> Tensor:
        """Compute the value by torch's kernel."""
        return torch.special.gammaincc(a, x)

    @staticmethod
    def slope(index: int, a: Tensor, x: Tensor) -> Tensor | float:
        """Minus the density by x; `_with_refusal` raises for the derivative by a."""
        return -GammaDensity.call(a, x) if index else 0.0


class HurwitzZeta(ElementwiseFunction):
    """ζ(s, x). Saves its inputs."""

    @staticmethod
    def forward(s: Any, x: Tensor) -> Tensor:
        """Compute the value by torch's kernel."""
        return torch.special.zeta(s, x)

    @staticmethod
    def slope(index: int, s: Any, x: Tensor) -> Tensor | float:
        r"""$-s\,ζ(s+1, x)$ by x; `_with_refusal` raises for the derivative by s."""
        return -s * _hurwitz(s + 1, x) if index else 0.0


def _with_refusal(value: Tensor, kernel: Callable[..., Tensor], order: Any, x: Tensor) -> Tensor:
    """Add a zero whose derivative by the order raises torch's error."""
    if not isinstance(order, Tensor) or not may_be_differentiated((order,)):
        return value
    refused = kernel(order, x.detach())
    return value + torch.nan_to_num(refused - refused.detach())


def _is_new(*_: Any, out: Any = None, **__: Any) -> bool:
    """Whether a call allocates its result; torch does not differentiate calls with `out`."""
    return out is None


@register(
    torch.igamma,
    Tensor.igamma,
    torch.special.gammainc,
    name="torch.special.gammainc",
    kind="missing",
    routes=ROUTES[1:],
    reason="no forward rule; in reverse NaN at 0",
    reference="Abramowitz & Stegun, 6.5.1",
    covers=_is_new,
)
def _lower(input: Tensor, other: Tensor) -> Any:
    return _incomplete(LowerGamma, torch.special.gammainc, input, other)


@register(
    torch.igammac,
    Tensor.igammac,
    torch.special.gammaincc,
    name="torch.special.gammaincc",
    kind="missing",
    routes=ROUTES[1:],
    reason="no forward rule; in reverse NaN at 0",
    reference="Abramowitz & Stegun, 6.5.3",
    covers=_is_new,
)
def _upper(input: Tensor, other: Tensor) -> Any:
    return _incomplete(UpperGamma, torch.special.gammaincc, input, other)


def _incomplete(function: Any, kernel: Callable[..., Tensor], a: Tensor, x: Tensor) -> Any:
    if not (a.is_floating_point() and x.is_floating_point()):
        return UNNEEDED
    return _with_refusal(function.call(a, x), kernel, a, x)


@register(
    torch.special.zeta,
    kind="missing",
    routes=ROUTES[1:],
    reason="no forward rule",
    reference="Abramowitz & Stegun, 23.2; term by term",
    covers=_is_new,
)
def _zeta(input: Any = None, other: Any = None, **numbers: Any) -> Any:
    # torch calls an order that is a number `self`.
    order = numbers.pop("self", input)
    if numbers or order is None or not isinstance(other, Tensor) or not other.is_floating_point():
        return UNNEEDED
    return _hurwitz(order, other)


def _hurwitz(s: Any, x: Tensor) -> Tensor:
    return _with_refusal(HurwitzZeta.call(s, x), torch.special.zeta, s, x)


def _log_gamma(x: Tensor, m: int) -> Tensor:
    """Derivative of order m: digamma, then Hurwitz zeta; below -100, where zeta is slow, trigamma (nine digits)."""
    if m == 1:
        return torch.digamma(x)
    if m > 2:
        return torch.polygamma(m - 1, x)
    far = x < -100
    return torch.where(far, torch.polygamma(1, x), torch.special.zeta(torch.full_like(x, 2), torch.where(far, 1, x)))


_NINE_DIGITS = "the derivative of digamma has nine digits alone"
_SERIES = "$\\psi'(x) = \\zeta(2, x)$"
enter("gammaln", _log_gamma, torch.lgamma, Tensor.lgamma, reason=_NINE_DIGITS, reference=_SERIES)
enter(
    "digamma",
    lambda x, m: _log_gamma(x, m + 1),
    *(torch.digamma, Tensor.digamma, torch.special.psi),
    reason=_NINE_DIGITS,
    reference=_SERIES,
)
