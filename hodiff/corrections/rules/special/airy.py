r"""Rules for the Airy function and the spherical Bessel function $j_0 = \sin(x) / x$.

Leibniz' rule gives the derivatives of Ai from $Ai'' = x\,Ai$, and the derivatives of $j_0$ from $x\,j_0 = \sin x$.
torch's kernel for Ai, which still gives the value, is off by up to 3e-6; torch has no kernel for Ai'.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hodiff.corrections.rules.special.special_functions import enter, horner

# Between these bounds: Taylor series about integers. To the right: an integral. To the left: expansions.
LEAST, GREATEST = -9, 1
TERMS = 24
STEP, STEPS = 0.125, 52


def _airy(x: Tensor, m: int) -> Tensor:
    """The derivative of order m of Ai, by $Ai^{(m+2)} = x Ai^{(m)} + m Ai^{(m-1)}$."""
    values = list(_value_and_slope(x))
    for k in range(m - 1):
        values.append(x * values[k] + (k * values[k - 1] if k else 0))
    return values[m]


def _value_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    left, middle, right = x < LEAST, x.clamp(LEAST, GREATEST), x > GREATEST
    # Arguments are clamped, as most expansions are inaccurate outside their part of the axis.
    parts = zip(_oscillating(-x.clamp(max=LEAST)), _expanded(middle), _decaying(x.clamp(min=GREATEST)), strict=True)
    value, slope = (torch.where(left, a, torch.where(right, c, b)) for a, b, c in parts)
    return value, slope


def _decaying(x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Ai by $\frac{e^{-ζ}}{\pi} \int_0^\infty e^{-\sqrt x t^2} \cos(t^3/3)\,dt$, $ζ = \frac23 x^{3/2}$, and Ai'."""
    root = x.sqrt()
    width = root**-0.5
    value, slope = torch.zeros_like(x), torch.zeros_like(x)
    for j in range(STEPS):
        u = j * STEP
        weight = math.exp(-u * u) * (1 if j else 0.5)
        t = u * width
        phase = t**3 / 3
        cosine = torch.cos(phase)
        value = value + weight * cosine
        slope = slope - weight * (root * cosine + t * torch.sin(phase))
    scale = torch.exp(-2 / 3 * x * root) * width * (STEP / math.pi)
    return scale * value, scale * slope


def _expanded(x: Tensor) -> tuple[Tensor, Tensor]:
    centre = x.round()
    table = torch.tensor(TAYLOR, dtype=x.dtype, device=x.device)
    terms = table[(centre - LEAST).long()].unbind(-1)
    slopes = [k * each for k, each in enumerate(terms)][1:]
    return horner(terms, x - centre), horner(slopes, x - centre)


def _taylor() -> list[list[float]]:
    """Taylor coefficients about each integer, from the series about its neighbour nearer to 0."""
    at_zero = (3 ** (-2 / 3) / math.gamma(2 / 3), -(3 ** (-1 / 3)) / math.gamma(1 / 3))
    rows = {0: _coefficients(0, *at_zero)}
    for c in (*range(1, GREATEST + 1), *range(-1, LEAST - 1, -1)):
        step = 1 if c > 0 else -1
        terms = _coefficients(c - step, rows[c - step][0], rows[c - step][1], count=2 * TERMS)
        value = math.fsum(each * step**k for k, each in enumerate(terms))
        slope = math.fsum(k * each * step ** (k - 1) for k, each in enumerate(terms) if k)
        rows[c] = _coefficients(c, value, slope)
    return [rows[c] for c in range(LEAST, GREATEST + 1)]


def _coefficients(c: int, value: float, slope: float, count: int = TERMS) -> list[float]:
    """Taylor coefficients about c of the solution of $y'' = x y$."""
    terms = [value, slope]
    for k in range(count - 2):
        terms.append((c * terms[k] + (terms[k - 1] if k else 0)) / ((k + 1) * (k + 2)))
    return terms


TAYLOR = _taylor()


def _oscillating(z: Tensor) -> tuple[Tensor, Tensor]:
    """Ai and Ai' at -z."""
    phase = 2 / 3 * z * z.sqrt()
    inverse = 1 / phase
    cosine, sine = torch.cos(phase - math.pi / 4), torch.sin(phase - math.pi / 4)
    (p, q), (r, s) = (
        (horner(terms[::2], inverse**2), horner(terms[1::2], inverse**2) * inverse) for terms in EXPANSIONS
    )
    root = z**0.25 * math.sqrt(math.pi)
    return (cosine * p + sine * q) / root, (sine * r - cosine * s) * z.sqrt() / root


def _expansions() -> tuple[list[float], list[float]]:
    u, v = [1.0], [1.0]
    for k in range(1, TERMS):
        u.append(u[-1] * (6 * k - 5) * (6 * k - 3) * (6 * k - 1) / (216 * k * (2 * k - 1)))
        v.append(-u[-1] * (6 * k + 1) / (6 * k - 1))
    first, second = ([(-1) ** (k // 2) * each for k, each in enumerate(terms)] for terms in (u, v))
    return first, second


EXPANSIONS = _expansions()


def _spherical(x: Tensor, m: int) -> Tensor:
    r"""The derivative of order m of $\sin(x) / x$: $\int_0^1 t^m \cos(xt + m\pi/2)\,dt$ as a series, or upwards."""
    limit = max(3.0, m / 2)
    near = x.clamp(-limit, limit)
    # The series of the m-th derivative of the cosine: its first power is 0 or 1.
    odd = m % 2
    first = -((m + 1) // 2)
    terms = [(-1) ** (k - first) / (math.factorial(2 * k + odd) * (2 * k + odd + m + 1)) for k in range(20 + m)]
    series = horner(terms, near * near) * (near if odd else 1)
    far = x.abs() > limit
    safe = torch.where(far, x, limit)
    cosine, sine = torch.cos(safe), torch.sin(safe)
    upwards = sine / safe
    for k in range(1, m + 1):
        upwards = ((sine, cosine, -sine, -cosine)[k % 4] - k * upwards) / safe
    return torch.where(far, upwards, series)


_ZERO = "its derivatives are silently zero"

enter(
    "airy_ai",
    _airy,
    reason=_ZERO,
    reference="Digital Library of Mathematical Functions, 9.2.1, 9.5.4, 9.7.9 and 9.7.10",
    constant=True,
)
enter(
    "spherical_bessel_j0",
    _spherical,
    reason=_ZERO,
    reference="Abramowitz & Stegun, 10.1.14",
    constant=True,
)
