"""Elementwise functions of one argument: systems of equations, or derivatives in closed form.

Quantities that are small where a function saturates are separate unknowns, so that no digits cancel: the slope of tanh,
and the slope of the sigmoid and its distance from one half.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hodiff.taylor.elementwise import Derivatives, Power, System

_ROOT_PI = math.sqrt(math.pi)
_ROOT_TWO_PI = math.sqrt(2 * math.pi)


def _sech2(x: Any) -> Any:
    return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)


def _tanh_to_second(x: Any) -> tuple[Any, Any, Any]:
    # Compilers compute these expressions once for each direction, and have no fast cosh.
    v, w = torch.tanh(x), _sech2(x)
    return v, w, -v * w


def _exp_to_second(x: Any) -> tuple[Any, Any, Any]:
    v = torch.exp(x)
    return v, v, v / 2


def _sin_to_second(x: Any) -> tuple[Any, Any, Any]:
    v = torch.sin(x)
    return v, torch.cos(x), v / -2


def _logistic_slopes(x: Any) -> tuple[Any, Any]:
    """The slope p of the sigmoid s, and d = s - (1 - s), which vanishes at 0: p' = -p d and d' = 2 p."""
    return torch.sigmoid(x) * torch.sigmoid(-x), torch.tanh(x / 2)


def _inverse_root(x: Any) -> Any:
    """1 / sqrt(1 + x²), where x² may overflow."""
    return 1 / torch.hypot(x, torch.ones_like(x))


def _normal_density(x: Any) -> Any:
    return torch.exp(-x * x / 2) / _ROOT_TWO_PI


def _inverse_density(x: Any) -> Any:
    """Inverse of the normal density at quantile x, by Mills' ratio; exp(v²/2) loses digits in the tails."""
    # All derivatives of both formulas are right, unlike those of an absolute value at 1/2.
    v, low = torch.special.ndtri(x), x < 0.5
    ratio = math.sqrt(math.pi / 2) * torch.special.erfcx(torch.where(low, -v, v) * math.sqrt(0.5))
    return ratio / torch.where(low, x, 1 - x)


def power(exponent: float) -> Power | Derivatives:
    """x^p: the binomial coefficient of p over m, times x^(p-m)."""

    def coefficient(x: Any, m: int) -> Any:
        factor = 1.0
        for j in range(m):
            factor = factor * (exponent - j) / (j + 1)
        if m == 0:
            return torch.pow(x, exponent)
        if factor == 0:
            return None
        return factor if exponent == m else factor * torch.pow(x, exponent - m)

    closed = Derivatives(coefficient)
    # A polynomial has finitely many terms, and a power above 1 has finite first derivatives at 0.
    return Power(exponent, closed) if exponent < 1 and exponent != 0 else closed


def hurwitz_zeta(s: int, x: Any) -> Any:
    r"""Hurwitz's $\zeta(s, x) = \sum_{n \ge 0} (x + n)^{-s}$ for s > 1, by reflection where x is negative."""
    # torch adds the terms up to zero one by one. The sum over all n is a derivative of π cot πx.
    negative = x < 0
    other = torch.special.zeta(s, torch.where(negative, 1 - x, x))
    # Derivatives must stay finite where nothing is reflected.
    cotangent = math.pi / torch.tan(math.pi * torch.where(negative, x - torch.round(x), 0.25))
    terms: list[Any] = [cotangent]  # The Taylor coefficients g_k of π cot πx, by g' = -(π² + g²).
    for k in range(1, s):
        square = sum(terms[i] * terms[k - 1 - i] for i in range(k))
        terms.append(-(square + (math.pi**2 if k == 1 else 0)) / k)
    everywhere = terms[-1] if s % 2 else -terms[-1]
    # Where torch's x^-s underflows, the first two terms of the Euler-Maclaurin formula suffice.
    large = x > 1e12
    safe = torch.where(large, x, 1)
    other = torch.where(large, safe ** (1 - s) / (s - 1) * (1 + (s - 1) / (2 * safe)), other)
    return torch.where(negative, everywhere + other if s % 2 else everywhere - other, other)


def _polygamma_value(n: int, x: Any) -> Any:
    # torch's trigamma has only nine correct digits.
    if n == 0:
        return torch.digamma(x)
    return hurwitz_zeta(n + 1, x) * (math.factorial(n) if n % 2 else -math.factorial(n))


def polygamma(n: int) -> Derivatives:
    """The derivative n of the digamma function."""
    return Derivatives(lambda x, m: _polygamma_value(n + m, x) / math.factorial(m))


def _lgamma(x: Any, m: int) -> Any:
    return torch.lgamma(x) if m == 0 else _polygamma_value(m - 1, x) / math.factorial(m)


SOFTPLUS = System(
    lambda x: (-torch.nn.functional.logsigmoid(-x), torch.sigmoid(x), *_logistic_slopes(x)),
    lambda u, v, s, p, d: (s, p, -p * d, 2 * p),
)
LOGSIGMOID = System(
    lambda x: (torch.nn.functional.logsigmoid(x), torch.sigmoid(-x), *_logistic_slopes(x)),
    lambda u, v, c, p, d: (c, -p, -p * d, 2 * p),
)
LOGIT = System(lambda x: (torch.logit(x),), lambda u, v: (1 / (u * (1 - u)),))

ELEMENTARY: dict[str, System | Power | Derivatives] = {
    # Exponentials and logarithms
    "exp": System(lambda x: (torch.exp(x),), lambda u, v: (v,), _exp_to_second),
    "exp2": System(lambda x: (torch.exp2(x),), lambda u, v: (math.log(2) * v,)),
    "expm1": System(lambda x: (torch.expm1(x), torch.exp(x)), lambda u, v, e: (e, e)),
    "log": System(lambda x: (torch.log(x),), lambda u, v: (1 / u,)),
    "log2": System(lambda x: (torch.log2(x),), lambda u, v: (1 / (math.log(2) * u),)),
    "log10": System(lambda x: (torch.log10(x),), lambda u, v: (1 / (math.log(10) * u),)),
    "log1p": System(lambda x: (torch.log1p(x),), lambda u, v: (1 / (1 + u),)),
    "special.entr": System(lambda x: (torch.special.entr(x), torch.log(x)), lambda u, v, w: (-1 - w, 1 / u)),
    # Powers
    "sqrt": power(0.5),
    "rsqrt": power(-0.5),
    "square": power(2),
    "reciprocal": power(-1),
    # Trigonometric and hyperbolic functions, and their inverses
    "sin": System(lambda x: (torch.sin(x), torch.cos(x)), lambda u, v, w: (w, -v), _sin_to_second),
    "cos": System(lambda x: (torch.cos(x), torch.sin(x)), lambda u, v, w: (-w, v)),
    "tan": System(lambda x: (torch.tan(x),), lambda u, v: (1 + v * v,)),
    "asin": System(lambda x: (torch.asin(x), torch.rsqrt((1 - x) * (1 + x))), lambda u, v, r: (r, u * r * r * r)),
    "acos": System(lambda x: (torch.acos(x), torch.rsqrt((1 - x) * (1 + x))), lambda u, v, r: (-r, u * r * r * r)),
    "atan": System(lambda x: (torch.atan(x), _inverse_root(x) ** 2), lambda u, v, r: (r, -2 * u * (r * r))),
    "sinh": System(lambda x: (torch.sinh(x), torch.cosh(x)), lambda u, v, w: (w, v)),
    "cosh": System(lambda x: (torch.cosh(x), torch.sinh(x)), lambda u, v, w: (w, v)),
    "tanh": System(lambda x: (torch.tanh(x), _sech2(x)), lambda u, v, w: (w, -2 * v * w), _tanh_to_second),
    "asinh": System(lambda x: (torch.asinh(x), _inverse_root(x)), lambda u, v, r: (r, -u * r * r * r)),
    "acosh": System(
        lambda x: (torch.acosh(x), torch.rsqrt(x - 1) * torch.rsqrt(x + 1)), lambda u, v, r: (r, -u * r * r * r)
    ),
    "atanh": System(lambda x: (torch.atanh(x), 1 / ((1 - x) * (1 + x))), lambda u, v, r: (r, 2 * u * (r * r))),
    "sigmoid": System(lambda x: (torch.sigmoid(x), *_logistic_slopes(x)), lambda u, s, p, d: (p, -p * d, 2 * p)),
    # The normal distribution's family
    "erf": System(lambda x: (torch.erf(x), 2 / _ROOT_PI * torch.exp(-x * x)), lambda u, v, g: (g, -2 * u * g)),
    "erfc": System(lambda x: (torch.erfc(x), 2 / _ROOT_PI * torch.exp(-x * x)), lambda u, v, g: (-g, -2 * u * g)),
    "erfinv": System(
        lambda x: (torch.erfinv(x), _ROOT_PI / 2 * torch.exp(torch.erfinv(x) ** 2)),
        lambda u, v, h: (h, 2 * v * h * h),
    ),
    "special.ndtr": System(lambda x: (torch.special.ndtr(x), _normal_density(x)), lambda u, v, g: (g, -u * g)),
    "special.ndtri": System(
        lambda x: (torch.special.ndtri(x), _inverse_density(x)),
        lambda u, v, h: (h, v * h * h),
    ),
    # The gamma function and its logarithm
    "lgamma": Derivatives(_lgamma),
    "digamma": polygamma(0),
    # Piecewise polynomials, with torch's slopes at the joints
    "abs": Derivatives(lambda x, m: (torch.abs, torch.sign)[m](x) if m < 2 else None),
    "relu": Derivatives(lambda x, m: torch.relu(x) if m == 0 else (x > 0).to(x.dtype) if m == 1 else None),
    "frac": Derivatives(lambda x, m: torch.frac(x) if m == 0 else 1.0 if m == 1 else None),
    "deg2rad": Derivatives(lambda x, m: torch.deg2rad(x) if m == 0 else math.pi / 180 if m == 1 else None),
    "rad2deg": Derivatives(lambda x, m: torch.rad2deg(x) if m == 0 else 180 / math.pi if m == 1 else None),
}
