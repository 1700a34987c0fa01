"""Wrong derivatives that were reported to PyTorch, each a function of a number whose derivative has a closed form.

Most reports are collected in pytorch#198017.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import mpmath
import torch
import torch.nn.functional as F
from corrections.against_torch import tensor
from custom_functions import Square

D = torch.float64


def number(value):
    return torch.tensor(value, dtype=D)


def nested(f, routes):
    """Derivative of a function of a number by forward ("f") and reverse mode ("r"), the innermost first."""
    for mode in routes:
        f = torch.func.grad(f) if mode == "r" else lambda t, f=f: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]
    return f


def matrix(rows):
    return torch.stack([torch.stack([torch.as_tensor(each, dtype=D) for each in row]) for row in rows])


def weighted(y, *weights):
    return (y.flatten() * tensor(*map(float, weights))).sum()


def cholesky_inverse(t):
    return torch.cholesky_inverse(matrix([[t + 1, 0.0], [1.0, 2.0]])).sum()


def cholesky_solve(t):
    factors = torch.stack([matrix([[2.0, 0.0], [t, 3.0]]), matrix([[3.0, 0.0], [2 * t + 1, 2.0]])])
    return weighted(torch.cholesky_solve(matrix([[1.0, 2.0], [-1.0, 3.0]]), factors), 1, 2, 3, 4, 2, -1, 4, 3)


def solve(t):
    a, b = matrix([[t + 2, 1.0], [0.0, t + 3]]), matrix([[t, 2 * t + 1], [t + 1, 3 - t]])
    return weighted(torch.linalg.solve(a, b, left=False), 1, 2, -1, 3)


def det(t):
    return torch.det(matrix([[t + 2, 1.0], [1.0, 2 * t + 3]]))


def slogdet(t):
    return torch.linalg.slogdet(matrix([[t + 2, 1.0], [1.0, 3.0]]))[1]


def reflector(t):
    return torch.linalg.householder_product(matrix([[1.0], [t]]), (2 / (1 + t * t)).reshape(1)).sum()


def layer_norm(t):
    x = torch.stack([t, torch.zeros((), dtype=D)]).reshape(1, 2)
    return F.layer_norm(x, [2], tensor(1.0, 2.0), tensor(0.0, 0.0), 0.25).sum()


def batch(t):
    return torch.stack([(i + 1) * t + (i % 3 - 1) * t * t + i for i in range(8)]).reshape(2, 2, 2)


SCALES, SHIFTS = tensor(1.5, -0.5), tensor(0.25, 1.0)


def batch_norm(t):
    y = F.batch_norm(batch(t), None, None, SCALES, SHIFTS, training=True, eps=0.25)
    return weighted(y, *range(1, 9))


def batch_norm_by_hand(t):
    x = batch(t)
    mean, variance = x.mean((0, 2), keepdim=True), x.var((0, 2), correction=0, keepdim=True)
    y = (x - mean) / (variance + 0.25).sqrt() * SCALES[:, None] + SHIFTS[:, None]
    return weighted(y, *range(1, 9))


def native_layer_norm(t):
    return torch.native_layer_norm(torch.stack([t, t**2, t + 1]), [3], None, None, 1e-5)[0][0]


def layer_norm_by_hand(t):
    x = torch.stack([t, t**2, t + 1])
    return ((x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt())[0]


def cumprod(t):
    x = matrix([[t, t + 1, 2 - t], [t - 1, 2 * t + 1, t + 3]])
    return weighted(x.cumprod(-1), 1, 2, 3, 4, 5, 6)


def scatter_reduce(t):
    x, src = torch.stack([t + 1, 2 * t + 1, t + 3]), torch.stack([t + 2, 3 * t + 1, 2 * t + 3])
    return weighted(torch.scatter_reduce(x, 0, torch.tensor([0, 0, 2]), src, "prod"), 2, -3, 5)


def sinc(t):
    return weighted(torch.sinc(torch.stack([t, 2 * t + 1, 2 - t / 2])), 2, -3, 5)


def sinc_second(t):
    """Second derivative of `sinc`, with the limit -pi^2 / 3 at 0."""

    def second(x):
        if x == 0:
            return -(math.pi**2) / 3
        u = math.pi * x
        return math.pi**2 * ((2 - u * u) * math.sin(u) - 2 * u * math.cos(u)) / u**3

    return 2 * second(t) - 12 * second(2 * t + 1) + 1.25 * second(2 - t / 2)


def logcumsumexp(t):
    x = matrix([[t, 1 - t, 2 * t + 3], [-t, t + 2, 3 * t - 1]])
    return weighted(torch.logcumsumexp(x, -1), 1, 2, -1, 3, -2, 4)


def triangular_solve(t):
    a = torch.stack([matrix([[t + 2, t / 4], [0.0, 3 - t]]), matrix([[2 * t + 1, 1 - t / 3], [0.0, t + 4]])])
    b = torch.stack([matrix([[1.0, 2.0], [3.0, -1.0]]), matrix([[2.0, -2.0], [1.0, 4.0]])])
    return weighted(torch.triangular_solve(b, a, unitriangular=True)[0], 1, 2, 3, 4, 5, 6, 7, 8)


def unpooled(t):
    """Unpool 1t, 2t, 3t and 4t, where the last number replaces the second."""
    x = torch.stack([t, 2 * t, 3 * t, 4 * t]).reshape(1, 1, 4)
    return weighted(F.max_unpool1d(x, torch.tensor([[[0, 1, 2, 1]]]), 1, output_size=[4]), 1, 3, 7, 11)


def atan2_of_halves(t):
    return torch.atan2(t, torch.tensor(2e-3, dtype=t.dtype))


def gaussian(t):
    """A Gaussian of the distance of two points that coincide at t = 0."""
    distance = torch.linalg.norm(torch.stack([t, 2 * t, -t]))
    return torch.exp(-distance * distance)


def squares_of_squares(t):
    return Square.apply(Square.apply(t))


@dataclass(frozen=True)
class Report:
    """A derivative of a function of a number that torch alone has wrong by some route."""

    f: Any
    at: float
    order: int
    truth: float
    # Larger where derivatives need more digits than a number near 1 leaves
    relative: float = 1e-11
    dtype: torch.dtype = D
    # The first version of torch that is right
    mended: str = "never"
    # Right in torch 2.13, at least on a CPU
    elsewhere: bool = False


def by_hand(f, at, order):
    return nested(f, "r" * order)(number(at)).item()


def logistic_slope(x):
    with mpmath.workdps(40):
        return float(mpmath.exp(-x) / (1 + mpmath.exp(-x)) ** 2)


def hyperbolic_slope(x):
    with mpmath.workdps(40):
        return float(1 / mpmath.cosh(x) ** 2)


REPORTS = {
    "#149694 det of the identity": Report(
        lambda t: torch.det(matrix([[1 + t, 0.0], [1.0, 1 + t]]) @ matrix([[1.0, 0.0], [-1.0, 1.0]])),
        0.0,
        2,
        2.0,
        mended="2.15",
    ),
    "#192521 det of clustered singular values": Report(
        lambda t: torch.linalg.det(torch.eye(3, dtype=D) * (1 + t)), 0.0, 2, 6.0, mended="2.15"
    ),
    "#192540 det": Report(
        lambda t: torch.linalg.det(matrix([[1.3 + t, 0.4], [-0.7, 0.9 + t]])), 0.0, 2, 2.0, mended="2.15"
    ),
    "#175754 native_layer_norm": Report(native_layer_norm, 0.7, 3, by_hand(layer_norm_by_hand, 0.7, 3), 1e-9),
    "#186256 native_batch_norm": Report(batch_norm, 0.7, 3, by_hand(batch_norm_by_hand, 0.7, 3), 1e-9),
    "#187460 ldexp": Report(lambda t: torch.ldexp(t, torch.tensor(-1)), 0.5, 1, 0.5, mended="2.14"),
    "#196680 ldexp": Report(
        lambda t: torch.ldexp(torch.stack([t, t * t]), torch.tensor([1, -2])).sum(), 0.7, 1, 2.35, mended="2.14"
    ),
    "#196682 cholesky_inverse": Report(cholesky_inverse, 0.7, 1, -2.5 / 1.7**3 + 0.5 / 1.7**2),
    "#196694 cholesky_solve": Report(cholesky_solve, -7.0, 1, -11 / 3),
    "#196695 linalg.solve": Report(solve, -0.5, 2, 3.0435555555555553, mended="2.15"),
    "#196696 det": Report(det, 0.7, 2, 4.0, mended="2.15"),
    "#196697 slogdet": Report(slogdet, 0.7, 2, -9 / (3 * 0.7 + 5) ** 2, mended="2.15"),
    "#196698 householder_product": Report(reflector, 0.7, 2, 1.556251320682393),
    "#196699 batch_norm": Report(batch_norm, -6.0, 2, by_hand(batch_norm_by_hand, -6.0, 2), 1e-9),
    "#196700 layer_norm": Report(layer_norm, 0.7, 2, 3 * 0.7 / (1 + 0.7**2) ** 2.5),
    "#196701 cumprod with a zero": Report(cumprod, 1.0, 2, 144.0),
    "#196702 scatter_reduce(prod)": Report(scatter_reduce, 0.01, 1, 57.6018),
    "#196703 sinc": Report(sinc, -0.5, 2, sinc_second(-0.5)),
    "#89459 sinc": Report(torch.sinc, 0.0, 4, math.pi**4 / 5),
    "#196705 logcumsumexp": Report(logcumsumexp, -400.0, 1, -5.0),
    "#196707 triangular_solve": Report(triangular_solve, -10.0, 1, 9.416666666666666),
    "#92075 a Gaussian of a norm": Report(gaussian, 0.0, 2, -12.0),
    "#197867 a Function with jvp": Report(squares_of_squares, 3.0, 3, 72.0),
    # Confirmed bugs of ∇Fuzz (Yang et al., Fuzzing automatic differentiation in deep-learning libraries, 2023)
    "#80204 max_unpool of indices that repeat": Report(unpooled, 0.7, 1, 34.0),
    "#80206 soft_margin_loss with uint8": Report(
        lambda t: F.soft_margin_loss(torch.stack([t, t / 2]), torch.tensor([0, 1], dtype=torch.uint8)),
        0.7,
        1,
        -1 / (4 * (1 + math.exp(0.35))),
    ),
    "#80762 atan2 with int8": Report(
        lambda t: torch.atan2(t, torch.tensor(100, dtype=torch.int8)), 0.6, 1, 100 / (100**2 + 0.6**2)
    ),
    "#80762 atan2 with int8, second": Report(
        lambda t: torch.atan2(t, torch.tensor(-100, dtype=torch.int8)), 0.6, 2, 200 * 0.6 / (100**2 + 0.6**2) ** 2
    ),
    "#80803 hardshrink by 0": Report(lambda t: F.hardshrink(t, 0.0), 0.0, 1, 1.0),
    "#80803 softshrink by 0": Report(lambda t: F.softshrink(t, 0.0), 0.0, 1, 1.0),
    "#80804 renorm to 0": Report(lambda t: torch.renorm(t.expand(2, 2), 2, -1, 0).sum(), 0.0, 1, 0.0),
    "#192723 mse_loss of whole numbers": Report(lambda t: F.mse_loss(t**2, torch.tensor(2)), 0.5, 2, -5.0),
    "#192723 smooth_l1_loss with whole numbers": Report(
        lambda t: F.smooth_l1_loss(t**2, torch.tensor(1)), 0.5, 2, -0.5
    ),
    "#193040 atan2": Report(atan2_of_halves, 2e-3, 1, 250.0, 1e-3, torch.float16),
    "#194699 prod of large numbers and zeros": Report(
        lambda t: torch.stack([t, 0 * t, 0 * t, t, t, 0 * t, t, t, t]).prod(), 1e13, 1, 0.0, dtype=torch.float32
    ),
    "#106789 prod": Report(lambda t: torch.stack([2 + 0 * t, 3 + 0 * t, t, t]).prod(), 0.0, 2, 12.0, elsewhere=True),
}


def log_softmax(t):
    return torch.special.log_softmax(torch.stack([t, torch.zeros_like(t)]), dim=-1)[0]


# The value rounds to its limit, the derivative does not
TAILS = {
    "#195527 sigmoid": Report(torch.sigmoid, 40.0, 1, logistic_slope(40)),
    "#195527 tanh": Report(torch.tanh, 20.0, 1, hyperbolic_slope(20)),
    "#195530 logsigmoid": Report(F.logsigmoid, 40.0, 2, -logistic_slope(40)),
    "#195679 logsigmoid": Report(F.logsigmoid, 37.42994775023705, 2, -logistic_slope(37.42994775023705)),
    "#195680 log_softmax": Report(log_softmax, 37.42994775023705, 1, logistic_slope(-37.42994775023705)),
    "#195680 log_softmax, second": Report(log_softmax, 40.0, 2, -logistic_slope(40)),
    "#195681 sigmoid": Report(torch.sigmoid, 37.42994775023705, 1, logistic_slope(37.42994775023705)),
    "#195685 tanh": Report(
        torch.tanh, -9.010913848876953, 1, hyperbolic_slope(-9.010913848876953), 1e-5, torch.float32
    ),
}


def routes_of(order):
    """All compositions of forward ("f") and reverse mode ("r")."""
    return list(itertools.product("rf", repeat=order))


def is_wrong(report, absolute=1e-9):
    """Whether torch alone is wrong, or raises, by some route."""
    at = torch.tensor(report.at, dtype=report.dtype)

    def wrong(routes):
        try:
            got = nested(report.f, routes)(at).item()
        except (RuntimeError, NotImplementedError):
            return True
        return not abs(got - report.truth) <= max(max(1e-6, report.relative) * abs(report.truth), absolute)

    return any(map(wrong, routes_of(report.order)))
