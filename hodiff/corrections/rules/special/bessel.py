r"""Rules for the Bessel functions J and Y, whose derivatives are Bessel functions.

$$ C_n^{(m)} = 2^{-m} \sum_i (-1)^i \binom{m}{i} C_{n-m+2i}, \qquad C_{-k} = (-1)^k C_k. $$

Orders 0 and 1 are integrals over a period, for which the trapezoidal rule converges faster than any power; from
`FAR` on, Hankel's expansions. torch's kernels, which still give the values, are off by up to 1e-6 beyond 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.corrections.rules.special.special_functions import enter, horner

# Beyond FAR the terms of Hankel's expansions fall below the rounding of float64; up to FAR the errors of the
# trapezoidal rules do.
FAR = 25.0
TERMS = 12
EULER = 0.5772156649015329


def _first_kind(x: Tensor, top: int) -> list[Tensor]:
    """J of orders 0 to `top`, and at least to 1, with relative accuracy near 0."""
    size = x.abs()
    j0, j1, _, _ = hankel(size.clamp(min=FAR))
    far = size > FAR
    values = [torch.where(far, j0, poisson(x, 0)), torch.where(far, j1 * x.sign(), poisson(x, 1))]
    for n in range(2, top + 1):
        # Upwards the recurrence is stable as long as the order is less than x.
        upwards = (2 * n - 2) / torch.where(x == 0, 1, x) * values[-1] - values[-2]
        values.append(torch.where(size > 2 * n, upwards, poisson(x, n)))
    return values


def _second_kind(x: Tensor, top: int) -> list[Tensor]:
    """Y of orders 0 to `top`, and at least to 1."""
    far, near = x > FAR, x.clamp(max=FAR)
    _, _, y0, y1 = hankel(x.clamp(min=FAR))
    first, second = _neumann(near)
    values = [torch.where(far, y0, first), torch.where(far, y1, second)]
    for n in range(2, top + 1):
        values.append((2 * n - 2) / x * values[-1] - values[-2])
    return values


def poisson(x: Tensor, n: int) -> Tensor:
    r"""$J_n(x) = \frac{(x/2)^n}{\sqrt\pi\,\Gamma(n + 1/2)} \int_0^\pi \cos(x \cos θ) \sin^{2n} θ\,dθ$ up to `FAR`."""
    near = x.clamp(-max(FAR, 2 * n), max(FAR, 2 * n))
    count = 17 + n
    total = torch.zeros_like(x)
    for cosine, sine in nodes(count):
        total = total + torch.cos(near * cosine) * sine ** (2 * n)
    return (near / 2) ** n * total * (math.sqrt(math.pi) / count / math.gamma(n + 0.5))


def nodes(count: int) -> list[tuple[float, float]]:
    """Cosines and sines of the midpoints of `count` intervals of a quarter of a circle."""
    angles = [(j + 0.5) * math.pi / (2 * count) for j in range(count)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _neumann(x: Tensor) -> tuple[Tensor, Tensor]:
    r"""$Y_0 = \frac2\pi (\ln \frac x2 + γ) J_0 - \frac4\pi \sum_k (-1)^k J_{2k} / k$ and $Y_1 = -Y_0'$ up to `FAR`."""
    total, slope = torch.zeros_like(x), torch.zeros_like(x)
    for cosine, weight in WEIGHTS:
        total = total + torch.cos(x * cosine) * weight
        slope = slope - torch.sin(x * cosine) * (weight * cosine)
    logarithm = torch.log(x / 2) + EULER
    j0, j1 = poisson(x, 0), poisson(x, 1)
    y0 = 2 / math.pi * logarithm * j0 - 4 / math.pi * total
    y1 = 2 / math.pi * (logarithm * j1 - j0 / x) + 4 / math.pi * slope
    return y0, y1


def _weights(count: int) -> list[tuple[float, float]]:
    r"""$\cos θ_j$ and $w_j$ with $\sum_k (-1)^k J_{2k}(x) / k = \sum_j w_j \cos(x \cos θ_j)$."""
    angles = [(j + 0.5) * math.pi / (2 * count) for j in range(count)]
    return [
        (math.cos(angle), math.fsum(math.cos(2 * k * angle) / k for k in range(1, count + 1)) / count)
        for angle in angles
    ]


WEIGHTS = _weights(36)


def hankel(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """J and Y of orders 0 and 1, from `FAR` on."""
    z = x**-2
    scale = 1 / torch.sqrt(math.pi * x)
    cosine, sine = torch.cos(x), torch.sin(x)
    # Sines and cosines of x minus a multiple of π/4, without rounding that difference.
    rising, falling = sine + cosine, sine - cosine
    (p0, q0), (p1, q1) = ((horner(even, z), horner(odd, z) / x) for even, odd in EXPANSIONS)
    j0, y0 = p0 * rising - q0 * falling, p0 * falling + q0 * rising
    j1, y1 = p1 * falling + q1 * rising, q1 * falling - p1 * rising
    return scale * j0, scale * j1, scale * y0, scale * y1


def _expansion(n: int) -> tuple[list[float], list[float]]:
    """The coefficients of Hankel's P and Q in powers of $x^{-2}$."""
    terms = coefficients(n, 2 * TERMS)
    signed = [(-1) ** (k // 2) * each for k, each in enumerate(terms)]
    return signed[::2], signed[1::2]


def coefficients(n: int, count: int) -> list[float]:
    r"""$a_k(n) = \frac{(4n^2 - 1^2)(4n^2 - 3^2) \cdots (4n^2 - (2k-1)^2)}{k!\,8^k}$."""
    terms = [1.0]
    for k in range(1, count):
        terms.append(terms[-1] * (4 * n * n - (2 * k - 1) ** 2) / (8 * k))
    return terms


EXPANSIONS = [_expansion(0), _expansion(1)]


def _derivative(orders: Callable[[Tensor, int], list[Tensor]], n: int) -> Callable[[Tensor, int], Tensor]:
    def derivative(x: Tensor, m: int) -> Tensor:
        values = orders(x, n + m)
        total = torch.zeros_like(x)
        for i in range(m + 1):
            k = n - m + 2 * i
            sign = -1 if (i + min(k, 0)) % 2 else 1
            total = total + values[abs(k)] * (sign * math.comb(m, i) / 2**m)
        return total

    return derivative


for _name, _orders, _n in (
    ("bessel_j0", _first_kind, 0),
    ("bessel_j1", _first_kind, 1),
    ("bessel_y0", _second_kind, 0),
    ("bessel_y1", _second_kind, 1),
):
    enter(
        _name,
        _derivative(_orders, _n),
        reason="its derivatives are silently zero; above 5, those of torch 2.15 are right to six digits only",
        reference="Abramowitz & Stegun, 9.1.27, 9.1.31 and 9.2.5; Poisson's integral 9.1.20; Neumann's series 9.1.89",
        constant=True,
    )
