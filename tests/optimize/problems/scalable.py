"""Scalar problems with any number of unknowns, in the forms and from the starts of CUTEst unless noted otherwise.

Sources: N. Gould, D. Orban & P. Toint, "CUTEst: a constrained and unconstrained testing environment with safe threads
for mathematical optimization", Computational Optimization and Applications 60 (2015); L. Luksan & J. Vlcek, "Test
problems for unconstrained optimization", report V-897, Prague (2003); for DIXMAAN, L. Dixon & Z. Maany, "A family of
test problems with sparse Hessians for unconstrained optimization", Hatfield Polytechnic (1988). Minima of certain sizes
are those that users of CUTEst report, to six digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import scipy.optimize
import torch
from optimize.problems import more_garbow_hillstrom as mgh
from optimize.problems.problem import Scalar
from optimize.problems.sequences import count, inner_points
from torch import Tensor

PROBLEMS: dict[str, Scalar] = {}
Minimum = float | dict[int, float] | Callable[[int], float]


def problem(
    *start: float | Callable[[int], Tensor], minimum: Minimum = 0.0, largest: int = 10_000
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Register a function by its name, with its start (repeated numbers or a function of n) and its minimum."""

    def enter(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        name = value.__name__.replace("_", " ")
        begin = start[0] if callable(start[0]) else _repeated(*start)
        PROBLEMS[name] = Scalar(name, value, begin, _by_size(minimum), largest)
        return value

    return enter


def _repeated(*numbers: float) -> Callable[[int], Tensor]:
    return lambda n: torch.tensor(numbers, dtype=torch.float64).repeat(n // len(numbers))


def _by_size(minimum: Minimum) -> Callable[[int], float | None]:
    if isinstance(minimum, dict):
        return minimum.get
    return minimum if callable(minimum) else lambda n: minimum


def _first(*numbers: float, then: float) -> Callable[[int], Tensor]:
    return lambda n: torch.cat([torch.tensor(numbers, dtype=torch.float64), _repeated(then)(n - len(numbers))])


@problem(1.0)
def arwhead(x):
    return ((x[:-1] ** 2 + x[-1] ** 2) ** 2 - 4 * x[:-1] + 3).sum()


@problem(1.0, minimum={100: 378.769, 1000: 3983.82, 5000: 20006.3})
def bdqrtic(x):
    square = x**2
    weighted = sum((k + 1) * square[k : len(x) - 4 + k] for k in range(4))
    return ((3 - 4 * x[:-4]) ** 2 + (weighted + 5 * square[-1]) ** 2).sum()


@problem(-1.0)
def broyden_banded(x):
    return mgh.broyden_banded(x).square().sum()


@problem(-1.0)
def broyden_tridiagonal(x):
    return mgh.broyden_tridiagonal(x).square().sum()


@problem(-1.2, 1.0, largest=1_000)
def chained_rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@problem(1.0, minimum=lambda n: 1.0 - n)
def cosine(x):
    return torch.cos(x[:-1] ** 2 - x[1:] / 2).sum()


@problem(_first(1.0, then=2.0), minimum={1000: 336.423, 5000: 1688.22})
def cragglvy(x):
    a, b, c, d = x[:-2:2], x[1:-2:2], x[2::2], x[3::2]
    return ((torch.exp(a) - b) ** 4 + 100 * (b - c) ** 6 + (torch.tan(c - d) + c - d) ** 4 + a**8 + (d - 1) ** 2).sum()


def _parabola(n: int) -> Tensor:
    t = inner_points(n)
    return t * (t - 1)


@problem(_parabola, largest=100)
def discrete_boundary_value(x):
    return mgh.discrete_boundary_value(x).square().sum()


@problem(-1.0)
def dixon_tridiagonal(x):
    return (x[0] - 1) ** 2 + ((x[1:-1] - x[2:]) ** 2).sum() + (x[-1] - 1) ** 2


@problem(3.0)
def dqdrtic(x):
    square = x**2
    return (square[:-2] + 100 * (square[1:-1] + square[2:])).sum()


@problem(2.0)
def dqrtic(x):
    return ((x - count(len(x))) ** 4).sum()


@problem(0.0, minimum={2000: 12003.28})
def edensch(x):
    return 16 + ((x[:-1] - 2) ** 4 + (x[:-1] * x[1:] - 2 * x[1:]) ** 2 + (x[1:] + 1) ** 2).sum()


@problem(2.0, minimum={1000: 1108.19, 5000: 5548.67})
def engval1(x):
    return ((x[:-1] ** 2 + x[1:] ** 2) ** 2 - 4 * x[:-1] + 3).sum()


@problem(3.0, -1.0, 0.0, 1.0)
def extended_powell_singular(x):
    return mgh.extended_powell_singular(x).square().sum()


@problem(-1.2, 1.0)
def extended_rosenbrock(x):
    return mgh.extended_rosenbrock(x).square().sum()


@problem(-3.0, -1.0)
def extended_wood(x):
    return mgh.wood(x.reshape(-1, 4).T).square().sum()


@problem(0.0, largest=100)
def fletchcr(x):
    return 100 * ((x[1:] - x[:-1] + 1 - x[:-1] ** 2) ** 2).sum()


@problem(_first(0.5, -2.0, then=0.0), minimum={1000: 121470.0, 5000: 608160.0})
def freuroth(x):
    a, b = x[:-1], x[1:]
    return ((a - 13 + ((5 - b) * b - 2) * b) ** 2 + (a - 29 + ((b + 1) * b - 14) * b) ** 2).sum()


@problem(4.0)
def liarwhd(x):
    return (4 * (x**2 - x[0]) ** 2 + (x - 1) ** 2).sum()


# This function has many local minima: a sum of t^2 + 4 cos t at integer combinations, with best value at 2 sin t = t.
def _noncvx_minimum(n: int) -> float:
    best = scipy.optimize.minimize_scalar(lambda t: t**2 + 4 * math.cos(t), bracket=(1.5, 2.0), tol=1e-12)
    return float(n * best.fun)


@problem(count, minimum=_noncvx_minimum, largest=1_000)
def noncvxun(x):
    n = len(x)
    i = torch.arange(n)
    t = x + x[(2 * i + 1) % n] + x[(3 * i + 2) % n]
    return (t**2 + 4 * torch.cos(t)).sum()


@problem(-1.0)
def nondia(x):
    return (x[0] - 1) ** 2 + 100 * ((x[0] - x[:-1] ** 2) ** 2).sum()


@problem(1.0, -1.0, largest=1_000)
def nondquar(x):
    return (x[0] - x[1]) ** 2 + ((x[:-2] + x[1:-1] + x[-1]) ** 4).sum() + (x[-2] + x[-1]) ** 2


def _penalty_minimum(n: int) -> float:
    """Compute the minimum: all elements of the minimiser equal the positive real root of a cubic."""
    roots = np.roots([2 * n, 0.0, 1e-5 - 0.5, -1e-5])
    t = float(max(roots[np.isreal(roots)].real))
    return 1e-5 * n * (t - 1) ** 2 + (n * t**2 - 0.25) ** 2


@problem(count, minimum=_penalty_minimum)
def penalty_1(x):
    return 1e-5 * ((x - 1) ** 2).sum() + (x @ x - 0.25) ** 2


@problem(1.0)
def power(x):
    return (count(len(x)) @ x**2) ** 2


@problem(3.0, minimum=lambda n: -3.0 * (n - 2))
def schmvett(x):
    a, b, c = x[:-2], x[1:-1], x[2:]
    return -(1 / (1 + (a - b) ** 2) + torch.sin((math.pi * b + c) / 2) + torch.exp(-(((a + c) / b - 2) ** 2))).sum()


@problem(0.1)
def tquartic(x):
    return (x[0] - 1) ** 2 + ((x[0] ** 2 - x[1:] ** 2) ** 2).sum()


@problem(1.0)
def tridia(x):
    i = count(len(x))
    return (x[0] - 1) ** 2 + (i[1:] * (2 * x[1:] - x[:-1]) ** 2).sum()


@problem(lambda n: torch.full((n,), 1 / n, dtype=torch.float64))
def trigonometric(x):
    return mgh.trigonometric(x).square().sum()


@problem(lambda n: 1 - count(n) / n, largest=100)
def variably_dimensioned(x):
    return mgh.variably_dimensioned(x).square().sum()


# Exponents of i / n in the four sums, by letters; and factors of the sums for each of these families.
_POWERS = {"abcd": (0, 0, 0, 0), "efgh": (1, 0, 0, 1), "ijkl": (2, 0, 0, 2), "mnop": (2, 1, 1, 2)}
_FACTORS = (
    (1.0, 0.0, 0.125, 0.125),
    (1.0, 0.0625, 0.0625, 0.0625),
    (1.0, 0.125, 0.125, 0.125),
    (1.0, 0.26, 0.26, 0.26),
)


def _dixmaan(powers: tuple[int, ...], factors: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    def value(x: Tensor) -> Tensor:
        m = len(x) // 3
        i = count(len(x)) / len(x)
        weights = [factor * i**power for factor, power in zip(factors, powers, strict=True)]
        terms = (
            x**2,
            x[:-1] ** 2 * (x[1:] + x[1:] ** 2) ** 2,
            x[: 2 * m] ** 2 * x[m:] ** 4,
            x[:m] * x[2 * m :],
        )
        return 1 + sum((weight[: len(term)] * term).sum() for weight, term in zip(weights, terms, strict=True))

    return value


for (_letters, _powers), (_k, _factors) in product(_POWERS.items(), enumerate(_FACTORS)):
    _name = f"dixmaan {_letters[_k]}"
    # The condition number grows like n to the power of that exponent.
    _largest = 1_500 if _powers[0] == 2 else 10_000
    PROBLEMS[_name] = Scalar(_name, _dixmaan(_powers, _factors), _repeated(2.0), _by_size(1.0), _largest, multiple=3)
