"""Taylor coefficients of functions along curves, by routes that share no code with series."""

import math

import mpmath
import torch

D = torch.float64


def mpmath_series(f, curve, order, digits=60):
    """Compute Taylor coefficients of f along a polynomial, by mpmath's differences with many digits."""
    with mpmath.workdps(digits):
        terms = [mpmath.mpf(each) for each in curve]
        # mpmath.polyval takes coefficients from the highest down.
        found = mpmath.taylor(lambda t: f(mpmath.polyval(terms[::-1], t)), 0, order)
        return [float(each.real) for each in found]


def derivatives(coefficients):
    """Convert Taylor coefficients to derivatives."""
    return [each * math.factorial(k) for k, each in enumerate(coefficients)]


def number(x):
    return torch.tensor(x, dtype=D)
