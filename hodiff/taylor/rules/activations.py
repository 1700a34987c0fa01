"""Rules for activations and other functions that are composed of simpler ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from hodiff.errors import RouteError
from hodiff.functions.activations.gated_derivatives import FLAT
from hodiff.taylor.elementwise import Derivatives, System
from hodiff.taylor.jets_in_arguments import moves, value_of
from hodiff.taylor.registry import name_of, rule
from hodiff.taylor.rules.arithmetic import in_dtype_of, of_one, with_value
from hodiff.taylor.rules.elementary import LOGSIGMOID, SOFTPLUS, _normal_density, _sech2, hurwitz_zeta, polygamma
from hodiff.taylor.series import Frame

# Compute Φ from erfc, because torch's ndtr loses its left tail.
_GELU = System(
    lambda x: (functional.gelu(x), torch.erfc(x * -math.sqrt(0.5)) / 2, _normal_density(x)),
    lambda u, v, p, g: (p + u * g, g, -u * g),
)
_TANHSHRINK = System(
    lambda x: (functional.tanhshrink(x), torch.tanh(x), _sech2(x)),
    lambda u, v, t, w: (t * t, w, -2 * t * w),
)


def _silu_to_second(x: Any) -> tuple[Any, Any, Any]:
    s, c = torch.sigmoid(x), torch.sigmoid(-x)
    slope = s * c
    return functional.silu(x), torch.addcmul(s, x, slope), slope * (1 + x * ((c - s) / 2))


_SILU = System(lambda x: (), lambda u: (), _silu_to_second)


@rule("threshold_backward")
def threshold_backward(frame: Frame, func: Any, vector: Any, x: Any, threshold: Any) -> Any:
    """Keep the vector where x is above the threshold or NaN; the result is linear in the vector."""
    return torch.where(value_of(frame, x) <= threshold, 0.0, vector)


@rule("nn.gelu")
def gelu(frame: Frame, func: Any, x: Any, approximate: str = "none") -> Any:
    """Compute GELU from the normal distribution, or from its tanh approximation."""
    if approximate == "none":
        return of_one(frame, x, _GELU)
    near = torch.clamp(x, -FLAT, FLAT)  # beyond, gelu is x or 0, and the cube may overflow
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (near + 0.044715 * near * near * near))


@rule("nn.silu")
def silu(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Product of x and its sigmoid."""
    return of_one(frame, x, _SILU) if frame.order <= 2 and frame.memory is None else x * torch.sigmoid(x)


@rule("nn.mish")
def mish(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Product of x and tanh(softplus(x))."""
    return x * torch.tanh(of_one(frame, x, SOFTPLUS))


@rule("nn.softplus")
def softplus(frame: Frame, func: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + exp(beta x)) / beta, or x above the threshold."""
    if not moves(frame, x):
        return func(x, beta, threshold)
    soft = of_one(frame, beta * x if beta != 1 else x, SOFTPLUS)
    soft = soft / beta if beta != 1 else soft
    u = x.value
    # Exactly at the threshold torch uses value and slope from below, and no higher derivatives.
    slope = torch.where(u * beta > threshold, 1.0, torch.sigmoid(beta * u)).to(u.dtype)
    value = torch.where(u * beta > threshold, u, soft.value)
    line = of_one(frame, x, Derivatives(lambda x, m: (value, slope)[m] if m < 2 else None))
    return torch.where(u * beta >= threshold, line, soft)


@rule("nn.softsign")
def softsign(frame: Frame, func: Any, x: Any) -> Any:
    """Quotient x / (1 + |x|); away from 0 derivatives of ±(1 - 1 / (1 + |x|)) avoid cancellation."""

    def coefficient(u: Any, m: int) -> Any:
        if m == 0:
            return functional.softsign(u)
        size = 1 / (1 + torch.abs(u)) ** (m + 1)
        # torch's derivative of |x| at 0 is 0.
        return size if m == 1 else -size * torch.sign(u) * (-torch.sign(u)) ** m

    return of_one(frame, x, Derivatives(coefficient))


@rule("nn.tanhshrink")
def tanhshrink(frame: Frame, func: Any, x: Any) -> Any:
    """Difference of x and tanh(x)."""
    return of_one(frame, x, _TANHSHRINK)


@rule("nn.logsigmoid")
def logsigmoid(frame: Frame, func: Any, x: Any) -> Any:
    """Logarithm of the sigmoid, by the logistic family's equations."""
    return of_one(frame, x, LOGSIGMOID)


def _exponential_below(frame: Frame, x: Any, alpha: float, scale: float, rate: float) -> Any:
    """Piecewise function: scale x above 0, and scale alpha expm1(rate x) below."""

    def coefficient(u: Any, m: int) -> Any:
        low = torch.clamp(u, max=0) * rate
        below = torch.expm1(low) if m == 0 else torch.exp(low) * (rate**m / math.factorial(m))
        above = u if m == 0 else 1.0 if m == 1 else 0.0
        # At 0 itself the slope is the slope from below, and higher derivatives are 0.
        return scale * torch.where(u > 0 if m < 2 else u >= 0, above, alpha * below).to(u.dtype)

    return of_one(frame, x, Derivatives(coefficient))


@rule("nn.elu")
def elu(frame: Frame, func: Any, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Identity above 0, and alpha expm1(x) below."""
    return _exponential_below(frame, x, alpha, 1.0, 1.0)


@rule("selu", "nn.selu")
def selu(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """ELU with fixed constants."""
    return _exponential_below(frame, x, 1.6732632423543772, 1.0507009873554805, 1.0)


@rule("celu", "nn.celu")
def celu(frame: Frame, func: Any, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """ELU with a continuous slope."""
    return _exponential_below(frame, x, alpha, 1.0, 1 / alpha)


@rule("nn.glu")
def glu(frame: Frame, func: Any, x: Any, dim: int = -1) -> Any:
    """First half of x times the sigmoid of the second half."""
    a, b = torch.chunk(x, 2, dim)
    return a * torch.sigmoid(b)


@rule("polygamma")
def polygamma_rule(frame: Frame, func: Any, n: Any, x: Any) -> Any:
    """Derivative n of the digamma function; the tensor method takes x first."""
    n, x = (n, x) if isinstance(n, int) else (x, n)
    return of_one(frame, x, polygamma(n))


@rule("special.zeta")
def zeta_rule(frame: Frame, func: Any, x: Any, q: Any, *, out: None = None) -> Any:
    r"""Coefficient m with respect to q is $(-1)^m \binom{x + m - 1}{m} \zeta(x + m, q)$; x must be constant."""
    if moves(frame, x):
        raise RouteError(
            "jet: special.zeta: x: expected a constant, got a jet, and the derivative with respect to it is not "
            "known; detach it, or register a rule by hodiff.taylor.register."
        )
    if isinstance(x, torch.Tensor):
        q = torch.broadcast_to(q, torch.broadcast_shapes(x.shape, q.shape))

    def coefficient(value: Any, m: int) -> Any:
        factor = 1.0
        for j in range(m):
            factor = factor * -(x + j) / (j + 1)
        # The reflection formula for integers avoids torch's loop from far below zero.
        whole = m > 0 and isinstance(x, (int, float)) and x == int(x) > 1
        return factor * (hurwitz_zeta(int(x) + m, value) if whole else torch.special.zeta(x + m, value))

    return of_one(frame, q, Derivatives(coefficient))


@rule("xlogy", "special.xlog1py")
def xlogy(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Product a log b, and 0 where a is a constant 0."""
    log = torch.log1p if "1p" in name_of(func) else torch.log
    value = func(value_of(frame, a), value_of(frame, b))
    a, b = in_dtype_of(value, a, b)
    still = a == 0 if value_of(frame, a) is a else torch.zeros((), dtype=torch.bool)
    safe = torch.where(still, torch.ones_like(value_of(frame, b)), b) if bool(still.any()) else b
    return with_value(frame, value, a * log(safe))


@rule("atan2")
def atan2(frame: Frame, func: Any, y: Any, x: Any, *, out: None = None) -> Any:
    """Arctangent of whichever quotient is at most 1 in size, with torch's value."""
    value = torch.atan2(value_of(frame, y), value_of(frame, x))
    y, x = in_dtype_of(value, y, x)
    steep = torch.abs(value_of(frame, y)) > torch.abs(value_of(frame, x))
    above = torch.where(steep, -x, y)
    below = torch.where(steep, y, x)
    return with_value(frame, value, torch.atan(above / below))


@rule("hypot")
def hypot(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Compute the length in axes along and across the value, so that no derivatives cancel; a norm at 0."""
    value = torch.hypot(value_of(frame, a), value_of(frame, b))
    a, b = in_dtype_of(value, a, b)
    x, y = value_of(frame, a), value_of(frame, b)
    usual = (value > 0) & torch.isfinite(value)
    size = torch.where(usual, value, 1.0)
    cosine, sine = torch.where(usual, x / size, 1.0), torch.where(usual, y / size, 0.0)
    along, across = cosine * a + sine * b, cosine * b - sine * a
    across = with_value(frame, torch.where(usual, 0.0, y), across)
    slant = across / with_value(frame, size, along)
    # Multiply by the slant instead of squaring `across`, whose square may underflow.
    found = with_value(frame, value, along + across * (slant / (1 + torch.sqrt(1 + slant * slant))))
    both = torch.stack([torch.broadcast_to(each, value.shape) for each in (a, b)])
    return torch.where(usual, found, torch.linalg.vector_norm(both, dim=0))


@rule("lerp")
def lerp(frame: Frame, func: Any, a: Any, b: Any, weight: Any, *, out: None = None) -> Any:
    """Interpolation a + weight (b - a)."""
    return a + weight * (b - a)


@rule("addcmul")
def addcmul(frame: Frame, func: Any, x: Any, a: Any, b: Any, *, value: Any = 1, out: None = None) -> Any:
    """Sum x + value a b."""
    return x + value * (a * b)


@rule("addcdiv")
def addcdiv(frame: Frame, func: Any, x: Any, a: Any, b: Any, *, value: Any = 1, out: None = None) -> Any:
    """Sum x + value a / b."""
    return x + value * (a / b)


@rule("ldexp")
def ldexp(frame: Frame, func: Any, x: Any, exponent: Any, *, out: None = None) -> Any:
    """Product of x and a power of 2."""
    return x * 2.0**exponent
