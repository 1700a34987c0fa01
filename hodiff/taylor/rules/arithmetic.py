"""Rules for sums, products, quotients and powers of two arguments that broadcast, after their ranks are aligned."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from typing import Any

import torch

from hodiff.taylor.elementwise import Derivatives, Power, System
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import moves, value_of
from hodiff.taylor.registry import analytic_rule, enter
from hodiff.taylor.rules.elementary import ELEMENTARY, LOGIT, power
from hodiff.taylor.series import Coefficient, Frame, plus, product, quotient, times


def series_of(frame: Frame, x: Any, rank: int) -> list[Coefficient]:
    """Coefficients of an argument; values with fewer than `rank` axes get new axes behind the directions."""
    if not moves(frame, x):
        return [x, *[None] * frame.order]
    missing = rank - x.value.ndim
    if missing <= 0 or frame.directions is None:
        return list(x.coefficients)
    return [
        each.reshape(frame.directions, *[1] * missing, *each.shape[1:])
        if each is not None and frame.has_axis(k)
        else each
        for k, each in enumerate(x.coefficients)
    ]


def aligned(frame: Frame, *args: Any) -> list[list[Coefficient]]:
    """Series of the arguments, in the rank that they broadcast to."""
    rank = max(getattr(value_of(frame, each), "ndim", 0) for each in args)
    return [series_of(frame, each, rank) for each in args]


def widened(frame: Frame, coefficients: Sequence[Coefficient]) -> Any:
    """Create a jet whose coefficients are expanded to the shape and dtype of the value."""
    value = coefficients[0]
    rest = [
        None if each is None else _in_shape(each, value, frame.shape(k, value.shape))
        for k, each in enumerate(coefficients)
        if k
    ]
    return new_jet(frame, [value, *rest])


def _in_shape(each: Any, value: Any, shape: tuple[int, ...]) -> Any:
    """Expand a coefficient; return the same tensor if it fits, so that later passes recognise it."""
    if each.dtype != value.dtype:
        each = each.to(value.dtype)
    return each if each.shape == shape else each.expand(shape)


def with_value(frame: Frame, value: Any, x: Any) -> Any:
    """Replace the value of a jet, such as by torch's own where a formula is for derivatives only."""
    return widened(frame, [value, *x.coefficients[1:]])


def in_dtype_of(value: torch.Tensor, *args: Any) -> list[Any]:
    """Convert arguments, among them numbers, to the dtype of the result, in which a rule then computes."""
    return [
        each.to(value.dtype) if isinstance(each, (torch.Tensor, Jet)) else torch.as_tensor(each, dtype=value.dtype)
        for each in args
    ]


@analytic_rule("add")
def add(frame: Frame, func: Any, a: Any, b: Any, *, alpha: Any = 1, out: None = None) -> Any:
    """Sum, coefficient by coefficient."""
    u, v = aligned(frame, a, b)
    found = frame.recalled(add, (u, v), alpha)
    if not found:
        found.append(u[0] + times(alpha, v[0]))
    for k in range(len(found), frame.order + 1):
        found.append(plus(u[k], times(alpha, v[k])))
    return widened(frame, found)


@analytic_rule("sub")
def sub(frame: Frame, func: Any, a: Any, b: Any, *, alpha: Any = 1, out: None = None) -> Any:
    """Difference a - alpha b."""
    return add(frame, func, a, b, alpha=-alpha)


@analytic_rule("rsub")
def rsub(frame: Frame, func: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """Difference b - alpha a."""
    return add(frame, func, b, a, alpha=-alpha)


@analytic_rule("mul")
def mul(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Cauchy product."""
    u, v = aligned(frame, a, b)
    return widened(frame, product(frame, u, u if a is b else v))


@analytic_rule("div")
def div(frame: Frame, func: Any, a: Any, b: Any, *, rounding_mode: str | None = None, out: None = None) -> Any:
    """Quotient of two series; a rounded quotient is constant between its jumps."""
    if rounding_mode is not None:
        return torch.div(value_of(frame, a), value_of(frame, b), rounding_mode=rounding_mode)
    u, v = aligned(frame, a, b)
    return widened(frame, quotient(frame, u, v))


@analytic_rule("rdiv")
def rdiv(frame: Frame, func: Any, a: Any, b: Any) -> Any:
    """Quotient b / a."""
    return div(frame, func, b, a)


@analytic_rule("pow")
def pow(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Binomial series for a constant exponent; exp(b log a) if it moves or is a complex number."""
    if not hasattr(b, "ndim"):
        if not isinstance(b, complex):
            return of_one(frame, a, power(b))
        return torch.exp(b * torch.log(a.to(torch.result_type(value_of(frame, a), 1j))))
    if moves(frame, b):
        return _moving_power(frame, a, b)
    u, _ = aligned(frame, a, b)
    return widened(frame, Derivatives(lambda x, m: _falling(x, b, m)).series(frame, u))


def _moving_power(frame: Frame, a: Any, b: Any) -> Any:
    """Power exp(b log a), scaled so that its value is exactly torch's."""
    x, y = value_of(frame, a), value_of(frame, b)
    value = torch.pow(x, y)
    if isinstance(a, (int, float, complex)):
        exponent = b * (_log(a) if a else 0.0)
        return with_value(frame, value, value * torch.exp(with_value(frame, torch.zeros_like(value), exponent)))
    # At a = 0 the exponent contributes no derivative, as in torch.
    a, b = in_dtype_of(value, a, b)
    zero = x == 0
    exponent = b * torch.log(torch.where(zero, 1.0, a))
    found = value * torch.exp(with_value(frame, torch.zeros_like(value), exponent))
    if moves(frame, a):
        found = torch.where(zero, torch.pow(a, y), found)
    return with_value(frame, value, found)


@analytic_rule("float_power")
def float_power(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Power in double precision."""
    return torch.pow(*(each.double() if hasattr(each, "double") else each for each in (a, b)))


def _log(number: Any) -> Any:
    return cmath.log(number) if isinstance(number, complex) or number <= 0 else math.log(number)


def _falling(x: Any, exponent: Any, m: int) -> Any:
    """The binomial coefficient of a tensor of exponents over m, times x^(p-m); 0 where the coefficient is 0."""
    factor = torch.ones_like(exponent)
    for j in range(m):
        factor = factor * (exponent - j) / (j + 1)
    # A negative power of 0 would give 0 times infinity, which is NaN.
    return factor * torch.where(factor == 0, 1, torch.pow(x, torch.where(factor == 0, 1, exponent - m)))


@analytic_rule("rpow")
def rpow(frame: Frame, func: Any, a: Any, b: Any) -> Any:
    """Power b ** a."""
    return pow(frame, func, b, a)


def of_one(frame: Frame, u: Any, function: System | Power | Derivatives) -> Any:
    """Apply an elementwise function to a jet."""
    return widened(frame, function.series(frame, u.coefficients))


# Functions whose rules hold for complex numbers; other functions fall back to forward mode there.
ANALYTIC = frozenset(("exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "sinh", "cosh"))


def _enter(name: str, function: System | Power | Derivatives) -> None:
    def rule(frame: Frame, func: Any, u: Any, *, out: None = None) -> Any:
        return of_one(frame, u, function)

    enter(name, rule, analytic=name in ANALYTIC)


@analytic_rule("logit")
def logit(frame: Frame, func: Any, x: Any, eps: float | None = None, *, out: None = None) -> Any:
    """log(x / (1 - x)), with x clamped to [eps, 1 - eps]."""
    return of_one(frame, x if eps is None else torch.clamp(x, eps, 1 - eps), LOGIT)


for _name, _function in ELEMENTARY.items():
    _enter(_name, _function)
