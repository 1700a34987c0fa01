"""The 35 problems of J. J. Moré, B. S. Garbow & K. E. Hillstrom, "Testing unconstrained optimization software", ACM
Transactions on Mathematical Software 7 (1981), pages 17-41, with their starts, minima and minimisers.

Sizes are those with published minima, or else 10 or 12. Norms at the start are those that MINPACK's test programs print
(Argonne National Laboratory, 1980), if a program has the problem in this form. Minima that the paper does not list are
marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from optimize.problems.problem import LeastSquares
from optimize.problems.sequences import count, inner_points, series
from torch import Tensor

PROBLEMS: dict[str, LeastSquares] = {}


@dataclass(frozen=True)
class Size:
    """One size of a problem: the suffix of its name, and its data."""

    start: Sequence[float] | Tensor
    minima: Sequence[float]
    minimisers: Sequence[Sequence[float]] = ()
    norm: float | None = None
    m: int | None = None


def problem(*sizes: Size) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a residual function, of x or of x and m, once for each size."""

    def enter(residuals: Callable[..., Tensor]) -> Callable[..., Tensor]:
        for size in sizes:
            start = torch.as_tensor(size.start, dtype=torch.float64)
            name = residuals.__name__.replace("_", " ") + (f" {len(start)}" if len(sizes) > 1 else "")
            PROBLEMS[name] = LeastSquares(
                name=name,
                residuals=_with_m(residuals, size.m),
                start=start,
                minima=tuple(size.minima),
                minimisers=tuple(map(tuple, size.minimisers)),
                norm_at_start=size.norm,
            )
        return residuals

    return enter


def _with_m(residuals: Callable[..., Tensor], m: int | None) -> Callable[[Tensor], Tensor]:
    return residuals if m is None else lambda x: residuals(x, m)


@problem(Size((-1.2, 1), (0,), [(1, 1)], 4.9193496))
def rosenbrock(x):
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


@problem(Size((0.5, -2), (0, 48.9842), [(5, 4)], 20.012496))
def freudenstein_and_roth(x):
    return torch.stack([-13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1], -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1]])


@problem(Size((0, 1), (0,), [(1.098e-5, 9.106)], 1.0654866))
def powell_badly_scaled(x):
    return torch.stack([1e4 * x[0] * x[1] - 1, torch.exp(-x[0]) + torch.exp(-x[1]) - 1.0001])


@problem(Size((1, 1), (0,), [(1e6, 2e-6)]))
def brown_badly_scaled(x):
    return torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2])


@problem(Size((1, 1), (0,), [(3, 0.5)]))
def beale(x):
    return series("1.5 2.25 2.625") - x[0] * (1 - x[1] ** count(3))


@problem(Size((0.3, 0.4), (124.362,), [(0.2578, 0.2578)], 64.585650))
def jennrich_and_sampson(x):
    i = count(10)
    return 2 + 2 * i - (torch.exp(i * x[0]) + torch.exp(i * x[1]))


@problem(Size((-1, 0, 0), (0,), [(1, 0, 0)], 50.0))
def helical_valley(x):
    turns = torch.atan(x[1] / x[0]) / (2 * math.pi) + torch.where(x[0] > 0, 0.0, 0.5)
    return torch.stack([10 * (x[2] - 10 * turns), 10 * (torch.hypot(x[0], x[1]) - 1), x[2]])


@problem(Size((1, 1, 1), (8.21487e-3, 17.4286), norm=6.4561363))
def bard(x):
    y = series("0.14 0.18 0.22 0.25 0.29 0.32 0.35 0.39 0.37 0.58 0.73 0.96 1.34 2.10 4.39")
    u = count(15)
    v = 16 - u
    return y - (x[0] + u / (v * x[1] + torch.minimum(u, v) * x[2]))


@problem(Size((0.4, 1, 0), (1.12793e-8,)))
def gaussian(x):
    half = series("0.0009 0.0044 0.0175 0.0540 0.1295 0.2420 0.3521 0.3989")
    t = (8 - count(15)) / 2
    return x[0] * torch.exp(-x[1] * (t - x[2]) ** 2 / 2) - torch.cat([half, half[:-1].flip(0)])


@problem(Size((0.02, 4000, 250), (87.9458,), norm=4.1153467e4))
def meyer(x):
    y = series("34780 28610 23650 19630 16370 13720 11540 9744 8261 7030 6005 5147 4427 3820 3307 2872")
    return x[0] * torch.exp(x[1] / (45 + 5 * count(16) + x[2])) - y


# The paper's "m i" in the exponent is a misprint of a minus sign.
@problem(Size((5, 2.5, 0.15), (0,), [(50, 25, 1.5)]))
def gulf_research_and_development(x):
    t = count(99) / 100
    y = 25 + (-50 * torch.log(t)) ** (2 / 3)
    return torch.exp(-((y - x[1]).abs() ** x[2]) / x[0]) - t


# All points with equal first two elements and a zero third element are minimisers, too.
@problem(Size((0, 10, 20), (0,), [(1, 10, 1), (10, 1, -1)], 32.111584))
def box_three_dimensional(x):
    t = count(10) / 10
    return torch.exp(-t * x[0]) - torch.exp(-t * x[1]) - x[2] * (torch.exp(-t) - torch.exp(-10 * t))


@problem(Size((3, -1, 0, 1), (0,), [(0, 0, 0, 0)], 14.662878))
def powell_singular(x):
    return torch.stack([
        x[0] + 10 * x[1],
        math.sqrt(5) * (x[2] - x[3]),
        (x[1] - 2 * x[2]) ** 2,
        math.sqrt(10) * (x[0] - x[3]) ** 2,
    ])


@problem(Size((-3, -1, -3, -1), (0,), [(1, 1, 1, 1)]))
def wood(x):
    return torch.stack([
        10 * (x[1] - x[0] ** 2),
        1 - x[0],
        math.sqrt(90) * (x[3] - x[2] ** 2),
        1 - x[2],
        math.sqrt(10) * (x[1] + x[3] - 2),
        (x[1] - x[3]) / math.sqrt(10),
    ])


@problem(Size((0.25, 0.39, 0.415, 0.39), (3.07505e-4, 1.02734e-3), norm=7.2891510e-2))
def kowalik_and_osborne(x):
    y = series("0.1957 0.1947 0.1735 0.1600 0.0844 0.0627 0.0456 0.0342 0.0323 0.0235 0.0246")
    u = series("4 2 1 0.5 0.25 0.167 0.125 0.1 0.0833 0.0714 0.0625")
    return y - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


@problem(Size((25, 5, -5, -1), (85822.2,), norm=2815.4384))
def brown_and_dennis(x):
    t = count(20) / 5
    return (x[0] + t * x[1] - torch.exp(t)) ** 2 + (x[2] + x[3] * torch.sin(t) - torch.cos(t)) ** 2


@problem(Size((0.5, 1.5, -1, 0.01, 0.02), (5.46489e-5,), norm=0.93756402))
def osborne_1(x):
    y = series(
        "0.844 0.908 0.932 0.936 0.925 0.908 0.881 0.850 0.818 0.784 0.751 0.718 0.685 0.658 0.628 0.603 "
        "0.580 0.558 0.538 0.522 0.506 0.490 0.478 0.467 0.457 0.448 0.438 0.431 0.424 0.420 0.414 0.411 "
        "0.406"
    )
    t = 10 * count(33, 0)
    return y - (x[0] + x[1] * torch.exp(-t * x[3]) + x[2] * torch.exp(-t * x[4]))


# The paper does not list the minimum zero.
@problem(Size((1, 2, 1, 1, 1, 1), (0, 5.65565e-3), [(1, 10, 1, 5, 4, 3), (4, 10, 3, 5, 1, 1)]))
def biggs_exp6(x):
    t = count(13) / 10
    y = torch.exp(-t) - 5 * torch.exp(-10 * t) + 3 * torch.exp(-4 * t)
    return x[2] * torch.exp(-t * x[0]) - x[3] * torch.exp(-t * x[1]) + x[5] * torch.exp(-t * x[4]) - y


@problem(Size((1.3, 0.65, 0.65, 0.7, 0.6, 3, 5, 7, 2, 4.5, 5.5), (4.01377e-2,), norm=1.4468654))
def osborne_2(x):
    y = series(
        "1.366 1.191 1.112 1.013 0.991 0.885 0.831 0.847 0.786 0.725 0.746 0.679 0.608 0.655 0.616 0.606 "
        "0.602 0.626 0.651 0.724 0.649 0.649 0.694 0.644 0.624 0.661 0.612 0.558 0.533 0.495 0.500 0.423 "
        "0.395 0.375 0.372 0.391 0.396 0.405 0.428 0.429 0.523 0.562 0.607 0.653 0.672 0.708 0.633 0.668 "
        "0.645 0.632 0.591 0.559 0.597 0.625 0.739 0.710 0.729 0.720 0.636 0.581 0.428 0.292 0.162 0.098 "
        "0.054"
    )
    t = count(65, 0) / 10
    peaks = sum(x[k] * torch.exp(-((t - x[k + 7]) ** 2) * x[k + 4]) for k in (1, 2, 3))
    return y - (x[0] * torch.exp(-t * x[4]) + peaks)


@problem(
    Size([0] * 6, (2.28767e-3,), norm=math.sqrt(30)),
    Size([0] * 9, (1.39976e-6,), norm=math.sqrt(30)),
    Size([0] * 12, (4.72238e-10,), norm=math.sqrt(30)),
)
def watson(x):
    powers = (count(29) / 29)[:, None] ** count(len(x), 0)
    slope = powers[:, :-1] @ (count(len(x) - 1) * x[1:])
    return torch.cat([slope - (powers @ x) ** 2 - 1, x[:1], (x[1] - x[0] ** 2 - 1)[None]])


@problem(Size([-1.2, 1] * 5, (0,), [[1] * 10]))
def extended_rosenbrock(x):
    return torch.stack([10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]], 1).flatten()


@problem(Size([3, -1, 0, 1] * 3, (0,), [[0] * 12]))
def extended_powell_singular(x):
    return powell_singular(x.reshape(-1, 4).T).T.flatten()


@problem(Size(count(4), (2.24997e-5,)), Size(count(10), (7.08765e-5,)))
def penalty_1(x):
    return torch.cat([math.sqrt(1e-5) * (x - 1), (x @ x - 0.25)[None]])


@problem(Size([0.5] * 4, (9.37629e-6,)), Size([0.5] * 10, (2.93660e-4,)))
def penalty_2(x):
    n, grown, scale = len(x), torch.exp(x / 10), math.sqrt(1e-5)
    y = torch.exp(count(n) / 10)
    return torch.cat([
        x[:1] - 0.2,
        scale * (grown[1:] + grown[:-1] - y[1:] - y[:-1]),
        scale * (grown[1:] - math.exp(-0.1)),
        ((n - count(n, 0)) @ x**2 - 1)[None],
    ])


@problem(Size(1 - count(10) / 10, (0,), [[1] * 10]))
def variably_dimensioned(x):
    weighted = (count(len(x)) @ (x - 1))[None]
    return torch.cat([x - 1, weighted, weighted**2])


@problem(Size([0.1] * 10, (0, 2.79506e-5), [[0] * 10], 8.4117534e-2))
def trigonometric(x):
    n = len(x)
    return n - torch.cos(x).sum() + count(n) * (1 - torch.cos(x)) - torch.sin(x)


@problem(Size([0.5] * 10, (0, 1), [[1] * 10], 16.530216))
def brown_almost_linear(x):
    return torch.cat([x[:-1] + x.sum() - (len(x) + 1), (x.prod() - 1)[None]])


@problem(Size(inner_points(10) * (inner_points(10) - 1), (0,), norm=0.028080582))
def discrete_boundary_value(x):
    t = inner_points(len(x))
    padded = torch.nn.functional.pad(x, (1, 1))
    return 2 * x - padded[:-2] - padded[2:] + (x + t + 1) ** 3 / (2 * (len(x) + 1) ** 2)


@problem(Size(inner_points(10) * (inner_points(10) - 1), (0,), norm=0.25182701))
def discrete_integral_equation(x):
    t = inner_points(len(x))
    kernel = torch.minimum(t[:, None], t) * (1 - torch.maximum(t[:, None], t))
    return x + kernel @ (x + t + 1) ** 3 / (2 * (len(x) + 1))


@problem(Size([-1] * 10, (0,), norm=4.5825757))
def broyden_tridiagonal(x):
    padded = torch.nn.functional.pad(x, (1, 1))
    return (3 - 2 * x) * x - padded[:-2] - 2 * padded[2:] + 1


@problem(Size([-1] * 10, (0,), norm=18.973666))
def broyden_banded(x):
    n, padded = len(x), torch.nn.functional.pad(x * (1 + x), (5, 1))
    return x * (2 + 5 * x**2) + 1 - sum(padded[k : k + n] for k in (0, 1, 2, 3, 4, 6))


@problem(Size([1] * 10, (10,), [[-1] * 10], m=20))
def linear_of_full_rank(x, m):
    return torch.cat([x, x.new_zeros(m - len(x))]) - 2 / m * x.sum() - 1


@problem(Size([1] * 10, (20 * 19 / (2 * 41),), m=20))
def linear_of_rank_1(x, m):
    return count(m) * (count(len(x)) @ x) - 1


@problem(Size([1] * 10, ((400 + 60 - 6) / (2 * 37),), m=20))
def linear_of_rank_1_with_zeros(x, m):
    rows = torch.nn.functional.pad(count(m - 2), (1, 1))
    return rows * (count(len(x) - 2, 2) @ x[1:-1]) - 1


@problem(
    Size(inner_points(8), (3.51687e-3,), norm=0.19651386),
    Size(inner_points(9), (0,), norm=0.16994993),
    # The paper does not list the lower minimum.
    Size(inner_points(10), (4.77271e-3, 6.50395e-3), norm=0.18374783),
)
def chebyquad(x):
    n = len(x)
    polynomials = [torch.ones_like(x), 2 * x - 1]
    while len(polynomials) <= n:
        polynomials.append(2 * (2 * x - 1) * polynomials[-1] - polynomials[-2])
    i = count(n)
    integrals = torch.where(i % 2 == 0, -1 / (i**2 - 1).clamp(min=1), 0.0)
    return torch.stack(polynomials[1:]).mean(1) - integrals
