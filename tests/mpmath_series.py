"""Curves, and the derivatives of functions along them by routes that share no code with series."""

import math

import mpmath
import torch

D = torch.float64


def mpmath_series(f, curve, order, digits=60):
    """Taylor coefficients of f along a polynomial, by mpmath's differences at many digits."""
    with mpmath.workdps(digits):
        terms = [mpmath.mpf(each) for each in curve]
        # Coefficients from the highest down, as mpmath.polyval takes them.
        found = mpmath.taylor(lambda t: f(mpmath.polyval(terms[::-1], t)), 0, order)
        return [float(each.real) for each in found]


def derivatives(coefficients):
    """Derivatives from Taylor coefficients."""
    return [each * math.factorial(k) for k, each in enumerate(coefficients)]


def number(x):
    return torch.tensor(x, dtype=D)
