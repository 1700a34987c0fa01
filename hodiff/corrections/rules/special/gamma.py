r"""Rules for derivatives of the incomplete gamma functions and Hurwitz's zeta function by their argument.

Derivatives by the order a or s have no closed form: the rules raise torch's own error for them.

$$ \frac{d}{dx} P(a, x) = g(a, x) = \frac{x^{a-1} e^{-x}}{Γ(a)}, \qquad \frac{dg}{dx} = g(a-1, x) - g(a, x), \qquad
   \frac{d}{dx} ζ(s, x) = -s\,ζ(s+1, x). $$

Derivatives of functions of the normal distribution's tail subtract nearly equal numbers in torch. Mills' ratio is a
continued fraction. With $ρ_n = 1 / (2x + 2(n+1)ρ_{n+1})$,

$$ \operatorname{erfcx}(x) = e^{x^2} \operatorname{erfc}(x) = \tfrac{2}{\sqrt\pi} ρ_0(x), \qquad
   \frac{d}{dx} \log Φ(x) = -x + \sqrt2\,ρ_1(-x/\sqrt2), $$

and nothing cancels in the Taylor series of a fraction of positive terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.special.special_functions import SpecialFunction, enter
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_operators.table import forms_of

# Bound from which the fraction is used, and its number of levels.
FAR = 3.0
LEVELS = 80


def _mills(x: Tensor, n: int, m: int) -> Tensor:
    """The derivative of order m of ρ_n, for x from `FAR` on."""
    series = [torch.zeros_like(x) for _ in range(m + 1)]
    for level in range(n + LEVELS, n - 1, -1):
        below = [2 * (level + 1) * each for each in series]
        below[0] = below[0] + 2 * x
        if m:
            below[1] = below[1] + 2
        series = [1 / below[0]]
        for k in range(1, m + 1):
            series.append(-series[0] * torch.stack([below[j] * series[k - j] for j in range(1, k + 1)]).sum(0))
    return series[m] * math.factorial(m)


def _erfcx(x: Tensor, m: int) -> Tensor:
    r"""Derivative by $y' = 2xy - 2/\sqrt\pi$, $y^{(k+1)} = 2 x y^{(k)} + 2 k y^{(k-1)}$, or by the fraction."""
    near = x.clamp(max=FAR)
    values = [torch.special.erfcx(near)]
    for k in range(m):
        values.append(2 * near * values[k] + (2 * k * values[k - 1] if k else -2 / math.sqrt(math.pi)))
    return torch.where(x > FAR, 2 / math.sqrt(math.pi) * _mills(x.clamp(min=FAR), 0, m), values[m])


def _log_ndtr(x: Tensor, m: int) -> Tensor:
    r"""Derivative by $r = φ/Φ$ with $r' = -r (x + r)$ and its derivatives, or by the fraction."""
    limit = -FAR * math.sqrt(2)
    near, far = x.clamp(min=limit), x.clamp(max=limit)
    ratios = [torch.exp(-0.5 * near * near - torch.special.log_ndtr(near)) / math.sqrt(2 * math.pi)]
    sums = [near + ratios[0]]
    for k in range(m - 1):
        ratios.append(-torch.stack([math.comb(k, j) * ratios[j] * sums[k - j] for j in range(k + 1)]).sum(0))
        sums.append(ratios[-1] + (0 if k else 1))
    tail = math.sqrt(2) * (-math.sqrt(0.5)) ** (m - 1) * _mills(far * -math.sqrt(0.5), 1, m - 1)
    tail = tail - (far if m == 1 else 1 if m == 2 else 0)
    return torch.where(x < limit, tail, ratios[m - 1])


_GAUTSCHI = "W. Gautschi, Efficient computation of the complex error function (1970), section 2"

enter(
    "erfcx",
    _erfcx,
    reason="for large x, derivatives are differences of nearly equal numbers; at 1e4 the second derivative has the "
    "wrong magnitude",
    reference=_GAUTSCHI,
)
enter(
    "log_ndtr",
    _log_ndtr,
    reason="far in the tail, derivatives are differences of nearly equal numbers; at -300 the third derivative has "
    "the wrong magnitude",
    reference=_GAUTSCHI,
)


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


class OfArgument(ElementwiseFunction):
    """A function in `_SLOPES` of an order and an argument. Saves its inputs."""

    @staticmethod
    def forward(order: Any, x: Tensor, name: str) -> Tensor:
        """Compute the value by torch's kernel."""
        value: Tensor = getattr(torch.special, name)(order, x)
        return value

    @staticmethod
    def slope(index: int, order: Any, x: Tensor, name: str) -> Tensor | float:
        """Return the derivative by the argument; `_of_argument` raises for the derivative by the order."""
        if not index:
            return 0.0
        # The formulas are finite where the function itself is not defined.
        undefined = order < _LEAST_ORDER[name]
        if isinstance(order, Tensor):
            order = torch.where(undefined, math.nan, order)
        return _SLOPES[name](math.nan if undefined is True else order, x)


# The least orders of defined values, by the names in `torch.special`.
_LEAST_ORDER = {"gammainc": 0, "gammaincc": 0, "zeta": 1}
# The derivatives by the argument, by the names in `torch.special`.
_SLOPES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gammainc": lambda a, x: GammaDensity.call(a, x),
    "gammaincc": lambda a, x: -GammaDensity.call(a, x),
    "zeta": lambda s, x: -s * _of_argument("zeta", s + 1, x),
}


def _of_argument(name: str, order: Any, x: Tensor) -> Tensor:
    """Compute a function in `_SLOPES`, plus a zero whose derivative by the order raises torch's error."""
    value: Tensor = OfArgument.call(order, x, name)
    if not isinstance(order, Tensor) or not may_be_differentiated((order,)):
        return value
    refused = getattr(torch.special, name)(order, x.detach())
    return value + torch.nan_to_num(refused - refused.detach())


def _is_new(*_: Any, out: Any = None, **__: Any) -> bool:
    """Whether a call allocates its result; torch does not differentiate calls with `out`."""
    return out is None


_INCOMPLETE = (
    "no forward rule; reverse mode returns NaN at 0; no derivative with respect to the first argument, in hodiff either"
)
_incomplete_is_missing = partial(register, kind="missing", routes=ROUTES[1:], reason=_INCOMPLETE, covers=_is_new)


@_incomplete_is_missing(torch.igamma, Tensor.igamma, torch.special.gammainc, reference="Abramowitz & Stegun, 6.5.1")
def _lower(input: Tensor, other: Tensor) -> Any:
    return _incomplete("gammainc", input, other)


@_incomplete_is_missing(torch.igammac, Tensor.igammac, torch.special.gammaincc, reference="Abramowitz & Stegun, 6.5.3")
def _upper(input: Tensor, other: Tensor) -> Any:
    return _incomplete("gammaincc", input, other)


def _incomplete(name: str, a: Tensor, x: Tensor) -> Any:
    return _of_argument(name, a, x) if a.is_floating_point() and x.is_floating_point() else UNNEEDED


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
    return _of_argument("zeta", order, other)


def _log_gamma(x: Tensor, m: int) -> Tensor:
    """Derivative of order m: digamma, then Hurwitz zeta; below -100, where zeta is slow, trigamma (nine digits)."""
    if m == 1:
        return torch.digamma(x)
    if m > 2:
        return torch.polygamma(m - 1, x)
    far = x < -100
    return torch.where(far, torch.polygamma(1, x), torch.special.zeta(torch.full_like(x, 2), torch.where(far, 1, x)))


_NINE_DIGITS = "the derivative of digamma has only nine digits"
_SERIES = "$\\psi'(x) = \\zeta(2, x)$"
enter("gammaln", _log_gamma, torch.lgamma, Tensor.lgamma, reason=_NINE_DIGITS, reference=_SERIES)
enter(
    "digamma",
    # At the poles left of 0, torch's digamma is NaN.
    lambda x, m: torch.where((x < 0) & (x == x.floor()), math.nan, _log_gamma(x, m + 1)),
    *(torch.digamma, Tensor.digamma, torch.special.psi),
    reason=_NINE_DIGITS,
    reference=_SERIES,
)


class MultivariateLogGamma(ElementwiseFunction):
    r"""$\log Γ_p(x) = \frac{p(p-1)}{4} \log π + \sum_{j<p} \log Γ(x - j/2)$. Saves its input."""

    @staticmethod
    def forward(x: Tensor, p: int) -> Tensor:
        """Compute the value by torch's kernel, which also validates the arguments."""
        return torch.mvlgamma(x, p)

    @staticmethod
    def slope(index: int, x: Tensor, p: int) -> Tensor:
        r"""$\sum_{j<p} ψ(x - j/2)$."""
        total: Tensor = sum(SpecialFunction.call(x - j / 2, "gammaln", 1) for j in range(p))
        return total


@register(*forms_of("mvlgamma"), routes=ROUTES, reason=_NINE_DIGITS, reference=_SERIES)
def _mvlgamma(input: Tensor, p: int, *, out: Tensor | None = None) -> Any:
    return MultivariateLogGamma.call(input, p) if out is None and input.is_floating_point() else UNNEEDED
