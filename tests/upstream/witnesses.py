"""Functions of a number that reach faults at special arguments, with their derivatives in closed form."""

import math

import mpmath
import torch
import torch.nn.functional as F
from corrections.public_reports import Report, logistic_slope


def silu_curvature(x):
    """The second derivative of x sigma(x)."""
    with mpmath.workdps(40):
        s = 1 / (1 + mpmath.exp(-mpmath.mpf(x)))
        return float(s * (1 - s) * (2 + x * (1 - 2 * s)))


def erfcx_third(x):
    """The third derivative of exp(x^2) erfc(x), by the recurrence y' = 2 x y - 2 / sqrt(pi)."""
    with mpmath.workdps(60):
        x, c = mpmath.mpf(x), 2 / mpmath.sqrt(mpmath.pi)
        y = mpmath.exp(x * x) * mpmath.erfc(x)
        first = 2 * x * y - c
        second = 2 * y + 2 * x * first
        return float(4 * first + 2 * x * second)


def log_ndtr_third(x):
    """The third derivative of the logarithm of the normal distribution function, with r = phi / Phi."""
    with mpmath.workdps(60):
        x = mpmath.mpf(x)
        r = mpmath.npdf(x) / mpmath.ncdf(x)
        first = -r * (x + r)
        second = -first * (x + r) - r * (1 + first)
        return float(second)


# By the name in the table of corrections
WITNESSES = {
    "torch.abs": Report(lambda t: torch.abs(t) ** 2, 0.0, 2, 2.0),
    "torch.acosh": Report(torch.acosh, 1e200, 1, 1e-200),
    "torch.asinh": Report(torch.asinh, 1e200, 1, 1e-200),
    "torch.expm1": Report(torch.expm1, -40.0, 1, math.exp(-40)),
    "torch.hypot": Report(lambda t: torch.hypot(t, 0 * t) ** 2, 0.0, 2, 2.0),
    "torch.linalg.vector_norm": Report(lambda t: torch.linalg.vector_norm(torch.stack([t, t])) ** 2, 0.0, 2, 4.0),
    "torch.logit": Report(lambda t: torch.logit(t, 0.1), 0.0, 2, 0.0),
    "torch.nn.functional.silu": Report(F.silu, 40.0, 2, silu_curvature(40)),
    "torch.pow": Report(lambda t: (2 + t).pow(t), 0.0, 2, math.log(2) ** 2 + 1),
    "torch.prod": Report(lambda t: torch.stack([t, t, t, 2 + 0 * t]).prod(), 0.0, 3, 12.0),
    "torch.softmax": Report(lambda t: torch.softmax(torch.stack([t, 0 * t]), 0)[0], 40.0, 1, logistic_slope(40)),
    "torch.special.bessel_j0": Report(torch.special.bessel_j0, 1.0, 1, -0.44005058574493355),
    "torch.special.erfcx": Report(torch.special.erfcx, 1e4, 3, erfcx_third(1e4)),
    "torch.special.log_ndtr": Report(torch.special.log_ndtr, -300.0, 3, log_ndtr_third(-300)),
    "torch.std": Report(lambda t: torch.std(torch.stack([t, -t])) ** 2, 0.0, 2, 4.0),
}
