"""Arithmetic and elementwise functions of tensors $E + O n$ that are computed from a length n (`lengths.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.values import numbers_of
from hodiff.corrections.rules.distances.graded import PIECEWISE, PIECEWISE_LINEAR, elementwise_parts
from hodiff.corrections.rules.distances.length_calls import Call, refused, tensors_in
from hodiff.corrections.rules.distances.lengths import by_square, even_power
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


def power(call: Call) -> Any:
    """Raise a tensor to a number; even powers of a multiple of a length are powers of its square."""
    exponent: Any = call.args[1] if len(call.args) == 2 else 2 if len(call.args) == 1 and not call.kwargs else None
    base = call.graded(0)
    if isinstance(exponent, Tensor) and not exponent.dim() and not carry_derivatives([exponent]):
        numbers = numbers_of(exponent)
        exponent = None if numbers is None or numbers.dim() else numbers.item()
    if base is None or type(exponent) not in (int, float) or call.kwargs:
        return None
    if base.even is None and exponent >= 2 and exponent % 2 == 0:
        x = call.args[0]
        return by_square(base.root, call.length(x), lambda: even_power(base, int(exponent)), call.value)
    return unary(call, "pow")


def _times(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a * b


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Sum of two numbers, set to 0 where they cancel up to rounding."""
    total = a + b
    cancelled = total.detach().abs() <= 16 * torch.finfo(total.dtype).eps * (a.detach().abs() + b.detach().abs())
    return torch.where(cancelled, 0, total)


def product(call: Call) -> Any:
    """Multiply a remembered tensor by any tensor, or by a function of the same length."""
    if len(call.args) != 2 or call.kwargs:
        return None
    (x, y), first, second = call.args, call.graded(0), call.graded(1)
    if first is None or second is None:
        graded, length, other = (first, x, y) if first is not None else (second, y, x)
        assert graded is not None
        if graded.even is None:
            return call.multiple(call.func(x, y), graded, _times(graded.odd, other), length, other)
        if call.zeros(length) is None:
            return None
        even, odd = call.parts(length)
        return call.mixed(length, even * other, odd * other)
    if first.root.key != second.root.key:
        kinks, others = call.kinks(x), call.kinks(y)
        if kinks is None or others is None or not bool(below_transforms(kinks & others).any()):
            return None
        return refused(call)
    if first.even is None and second.even is None:

        def even() -> Tensor:
            factor, square = _times(first.odd, second.odd), first.root.square()
            return square if factor is None else factor * square

        return by_square(first.root, call.length(x), even, call.value)
    if (zero := call.zeros(x)) is None or call.zeros(y) is None:
        return None
    (e1, o1), (e2, o2) = call.parts(x), call.parts(y)
    square = torch.where(zero, first.root.square(), 0)
    return call.mixed(x, e1 * e2 + o1 * o2 * square, _difference(e1 * o2, e2 * o1))


def quotient(call: Call) -> Any:
    """Divide a remembered tensor by any tensor, or multiply by the reciprocal of a remembered divisor."""
    if len(call.args) != 2 or call.kwargs:
        return None
    (x, y), first, second = call.args, call.graded(0), call.graded(1)
    if second is None:
        assert first is not None
        if first.even is None:
            odd = 1 / y if first.odd is None else first.odd / y
            return call.multiple(call.func(x, y), first, odd, x, y)
        if call.zeros(x) is None:
            return None
        even, odd = call.parts(x)
        return call.mixed(x, even / y, odd / y)
    if call.zeros(y) is None:
        return None
    return call.again(lambda: x * y.reciprocal())


def reversed_quotient(call: Call) -> Any:
    """Divide a number by a function of a length."""
    x, other = call.args
    if call.zeros(x) is None:
        return None
    return call.again(lambda: x.reciprocal() * other)


def sum_of(first_sign: int, second_sign: int) -> Callable[[Call], Any]:
    """Return the rule for a sum with these signs."""

    def rule(call: Call) -> Any:
        if len(call.args) != 2 or set(call.kwargs) - {"alpha"}:
            return None
        (x, y), alpha = call.args, call.kwargs.get("alpha", 1)
        first, second = call.graded(0), call.graded(1)
        length = x if first is not None else y
        if first is not None and second is not None and first.root.key != second.root.key:
            return None
        if call.zeros(length) is None or (second is not None and call.zeros(y) is None):
            return None
        (e1, o1), (e2, o2) = call.parts(x), call.parts(y)
        a, b = (first_sign, second_sign * alpha) if first_sign > 0 else (first_sign * alpha, second_sign)
        odds = [factor * odd for factor, odd in ((a, o1), (b, o2)) if odd is not None]
        return call.mixed(length, a * e1 + b * e2, odds[0] if len(odds) == 1 else _difference(*odds))

    return rule


def negative(call: Call) -> Any:
    """Negate a remembered tensor."""
    (x,), graded = call.args, call.graded(0)
    assert graded is not None
    if graded.even is None:
        return call.multiple(call.func(x), graded, -1 if graded.odd is None else -graded.odd, x)
    if call.zeros(x) is None:
        return None
    even, odd = call.parts(x)
    return call.mixed(x, -even, -odd)


def unary(call: Call, name: str) -> Any:
    """Apply an elementwise function, by its Taylor series where the length is 0."""
    if not call.args or len(list(tensors_in(call.args, call.kwargs))) != 1 or call.kwargs.get("out") is not None:
        return None
    x = call.args[0]
    graded = call.graded(0)
    if graded is None or (zero := call.zeros(x)) is None:
        return None
    even, odd = call.parts(x)

    def function(each: Tensor) -> Tensor:
        with call.mode:
            value: Tensor = call.func(each, *call.args[1:], **call.kwargs)
        return value

    square = torch.where(zero, graded.root.square(), 0).to(even.dtype)
    try:
        if name in PIECEWISE_LINEAR:
            found = _on_line(function, even, odd)
        else:
            smooth = _on_piece(function, even, odd) if name in PIECEWISE else function
            found = elementwise_parts(name, smooth, call.args[1:], (even, odd), square, zero)
    except RuntimeError:  # torch nests no forward mode in torch.autograd.forward_ad
        return None
    if not all(bool(below_transforms(each.detach().isfinite() | ~zero).all()) for each in found):
        return None
    return call.mixed(x, *found)


def _on_line(function: Callable[[Tensor], Tensor], even: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of a piecewise linear function of E + O n, on the piece to which O leads."""
    point, beside = even.detach(), even.detach() + _last_digit(even, odd)
    slope = torch.func.jvp(function, (beside,), (torch.ones_like(beside),))[1].detach()
    return function(point) + slope * (even - point), slope * odd


def _on_piece(function: Callable[[Tensor], Tensor], even: Tensor, odd: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function with its value at E, and with the derivatives of the piece to which O leads."""
    step = _last_digit(even, odd)
    change = (function(even.detach()) - function(even.detach() + step)).detach()
    return lambda x: function(x + step) + change


def _last_digit(even: Tensor, odd: Tensor) -> Tensor:
    """Smallest change of E in the direction of O."""
    digit = torch.finfo(even.dtype)
    return odd.detach().sign() * torch.clamp(digit.eps * even.detach().abs(), min=digit.tiny)
