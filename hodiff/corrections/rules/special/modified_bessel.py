r"""Rules for the modified Bessel functions I and K, also scaled by $e^{-|x|}$ and $e^x$.

Derivatives are sums of terms of one sign, $I_n^{(m)} = 2^{-m} \sum_i \binom{m}{i} I_{n-m+2i}$ and $(-1)^m$ times the
same sum for K. Derivatives of the scaled functions are integrals of one sign:

$$ \frac{d^m}{dx^m} \frac{e^{-x} I_n}{x^n} = \frac{(-1)^m}{2^n \sqrt\pi\,\Gamma(n + 1/2)}
   \int_0^\pi (1 - \cos θ)^m e^{-x (1 - \cos θ)} \sin^{2n} θ\,dθ, \qquad
   \frac{d^m}{dx^m} e^x K_n = (-1)^m \int_0^\infty (\cosh t - 1)^m e^{-x (\cosh t - 1)} \cosh nt\,dt. $$

So no digits cancel, while torch's rules divide by x, or take differences of nearly equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.corrections.rules.special.bessel import coefficients, nodes
from hodiff.corrections.rules.special.special_functions import enter, horner

# Bound from which expansions in 1/x are used, whose first terms and their derivatives have one sign.
FAR = 50.0
TERMS = 24
# Steps and range of the trapezoidal rule for K.
STEP, STEPS = 0.09375, 48


def _damped(x: Tensor, n: int, m: int) -> Tensor:
    """The derivative of order m of $e^{-x} I_n / x^n$ at |x|, up to the sign $(-1)^m$."""
    size, far = x.abs(), FAR + 2 * n * n
    near, beyond = size.clamp(max=far), size.clamp(min=far)
    count = 8 + n + math.ceil(math.sqrt(6 * far))
    total = torch.zeros_like(size)
    for cosine, sine in nodes(count):
        weight = sine ** (2 * n)
        # 1 - cos θ, computed without a difference, and its mirror image.
        lesser, greater = sine * sine / (1 + cosine), 1 + cosine
        total = total + (lesser**m * weight) * torch.exp(-near * lesser)
        total = total + (greater**m * weight) * torch.exp(-near * greater)
    total = total * (math.sqrt(math.pi) / (2 * count) / 2**n / math.gamma(n + 0.5))
    signed = [(-1) ** k * each for k, each in enumerate(coefficients(n, TERMS))]
    return torch.where(size > far, _expanded(signed, beyond, n, m) / math.sqrt(2 * math.pi), total)


def _expanded(terms: list[float], x: Tensor, n: int, m: int) -> Tensor:
    r"""The derivative of order m, without its sign, of $\sum_k a_k x^{-k - n - 1/2}$."""
    powers = [each * math.gamma(k + n + 0.5 + m) / math.gamma(k + n + 0.5) for k, each in enumerate(terms)]
    return horner(powers, 1 / x) * torch.rsqrt(x) * x ** -(n + m)


def _first_kind(x: Tensor, top: int) -> list[Tensor]:
    """I of orders 0 to `top`."""
    # Two factors, as a single exponential overflows before the product does.
    half = torch.exp(x.abs() / 2)
    return [x**n * (_damped(x, n, 0) * half) * half for n in range(top + 1)]


def _second_kind(x: Tensor, top: int) -> list[Tensor]:
    """K of orders 0 to `top`, and at least to 1."""
    values = [torch.special.modified_bessel_k0(x), torch.special.modified_bessel_k1(x)]
    for n in range(2, top + 1):
        values.append((2 * n - 2) / x * values[-1] + values[-2])
    return values


def _derivative(orders: Callable[[Tensor, int], list[Tensor]], n: int, sign: int) -> Callable[[Tensor, int], Tensor]:
    def derivative(x: Tensor, m: int) -> Tensor:
        values = orders(x, n + m)
        total = torch.zeros_like(x)
        for i in range(m + 1):
            total = total + values[abs(n - m + 2 * i)] * (math.comb(m, i) * (sign / 2) ** m)
        return total

    return derivative


def _scaled_first_kind(n: int) -> Callable[[Tensor, int], Tensor]:
    def derivative(x: Tensor, m: int) -> Tensor:
        # Both functions are even or odd. Derivatives that jump at 0 are 0 there.
        value = _damped(x, n, m)
        if n:
            value = x.abs() * value - m * _damped(x, n, m - 1)
        return value * (-1) ** m * (x.sign() if (n + m) % 2 else 1)

    return derivative


def _scaled_second_kind(n: int) -> Callable[[Tensor, int], Tensor]:
    def derivative(x: Tensor, m: int) -> Tensor:
        middle, beyond = x.clamp(1, FAR), x.clamp(min=FAR)
        total = torch.zeros_like(x)
        for j in range(STEPS):
            rise = 2 * math.sinh(j * STEP / 2) ** 2
            weight = STEP * rise**m * math.cosh(n * j * STEP) * (1 if j else 0.5)
            total = total + weight * torch.exp(-middle * rise)
        far = _expanded(coefficients(n, TERMS), beyond, 0, m) * math.sqrt(math.pi / 2)
        near = _scaled_near(x.clamp(max=1), n, m)
        return torch.where(x < 1, near, torch.where(x > FAR, far, total) * (-1) ** m)

    return derivative


def _scaled_near(x: Tensor, n: int, m: int) -> Tensor:
    """Derivative by Leibniz' rule, which cancels nothing where K grows steeply."""
    terms = [math.comb(m, j) * _derivative(_second_kind, n, -1)(x, j) for j in range(m + 1)]
    return torch.exp(x) * torch.stack(terms).sum(0)


_SOURCE = "Abramowitz & Stegun, 9.6.18, 9.6.24, 9.6.29 and 9.7.1"
_ZERO = "its derivatives are silently zero"
_NEAR = "the rule divides by x, so the third derivative is wrong near 0"
_FAR = "derivatives are differences of nearly equal numbers and lose all digits; near 0 they are also wrong"

for _name, _reason, _rule in (
    ("i1", _NEAR, _derivative(_first_kind, 1, 1)),
    ("i0e", _FAR, _scaled_first_kind(0)),
    ("i1e", _FAR, _scaled_first_kind(1)),
    ("modified_bessel_i0", _ZERO, _derivative(_first_kind, 0, 1)),
    ("modified_bessel_i1", _ZERO, _derivative(_first_kind, 1, 1)),
    ("modified_bessel_k0", _ZERO, _derivative(_second_kind, 0, -1)),
    ("modified_bessel_k1", _ZERO, _derivative(_second_kind, 1, -1)),
    ("scaled_modified_bessel_k0", _ZERO, _scaled_second_kind(0)),
    ("scaled_modified_bessel_k1", _ZERO, _scaled_second_kind(1)),
):
    enter(_name, _rule, reason=_reason, reference=_SOURCE, constant=_reason == _ZERO)
enter("i0", _derivative(_first_kind, 0, 1), torch.i0, Tensor.i0, reason=_NEAR, reference=_SOURCE)
