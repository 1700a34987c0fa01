"""Tests of elementwise functions in Taylor mode, along curves, against mpmath's series at sixty digits."""

import math

import mpmath as mp
import pytest
import torch
from mpmath_series import mpmath_series, number
from torch.nn import functional

from hodiff import directional_derivatives
from hodiff.taylor import jet
from hodiff.taylor.rules.elementary import ELEMENTARY
from hodiff.torch_operators.operator import Kind
from hodiff.torch_operators.table import functions_of_kind

FUNCTIONS = {
    "exp": (torch.exp, mp.exp, (-3.0, 0.4)),
    "exp2": (torch.exp2, lambda x: mp.power(2, x), (-3.0, 0.4)),
    "expm1": (torch.expm1, mp.expm1, (-3.0, 1e-3)),
    "log": (torch.log, mp.log, (0.3, 7.0)),
    "log2": (torch.log2, lambda x: mp.log(x, 2), (0.3, 7.0)),
    "log10": (torch.log10, mp.log10, (0.3, 7.0)),
    "log1p": (torch.log1p, mp.log1p, (-0.6, 1e-3)),
    "special.entr": (torch.special.entr, lambda x: -x * mp.log(x), (0.3, 2.0)),
    "sqrt": (torch.sqrt, mp.sqrt, (0.3, 7.0)),
    "rsqrt": (torch.rsqrt, lambda x: 1 / mp.sqrt(x), (0.3, 7.0)),
    "square": (torch.square, lambda x: x * x, (0.0, -2.0)),
    "reciprocal": (torch.reciprocal, lambda x: 1 / x, (0.3, -2.0)),
    "sin": (torch.sin, mp.sin, (0.0, 2.0)),
    "cos": (torch.cos, mp.cos, (0.0, 2.0)),
    "tan": (torch.tan, mp.tan, (0.0, 1.2)),
    "asin": (torch.asin, mp.asin, (0.0, -0.7)),
    "acos": (torch.acos, mp.acos, (0.0, -0.7)),
    "atan": (torch.atan, mp.atan, (0.0, 5.0)),
    "sinh": (torch.sinh, mp.sinh, (0.0, 2.0)),
    "cosh": (torch.cosh, mp.cosh, (0.0, 2.0)),
    "tanh": (torch.tanh, mp.tanh, (0.2, 15.0)),
    "asinh": (torch.asinh, mp.asinh, (0.0, 5.0)),
    "acosh": (torch.acosh, mp.acosh, (1.5, 5.0)),
    "atanh": (torch.atanh, mp.atanh, (0.0, -0.7)),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mp.exp(-x)), (-30.0, 0.3)),
    "logit": (torch.logit, lambda x: mp.log(x / (1 - x)), (0.2, 0.7)),
    "logsigmoid": (functional.logsigmoid, lambda x: -mp.log1p(mp.exp(-x)), (-30.0, 0.3)),
    "erf": (torch.erf, mp.erf, (0.0, 1.5)),
    "erfc": (torch.erfc, mp.erfc, (0.0, 4.0)),
    "erfinv": (torch.erfinv, mp.erfinv, (0.1, -0.7)),
    "special.ndtr": (torch.special.ndtr, mp.ncdf, (0.0, -4.0)),
    "special.ndtri": (torch.special.ndtri, lambda x: mp.sqrt(2) * mp.erfinv(2 * x - 1), (0.3, 0.7)),
    "lgamma": (torch.lgamma, mp.loggamma, (0.7, 5.0)),
    "digamma": (torch.digamma, mp.digamma, (0.7, 5.0)),
    "abs": (torch.abs, lambda x: x, (0.7,)),
    "relu": (torch.relu, lambda x: x, (0.7,)),
    "frac": (torch.frac, lambda x: x - 2, (2.3,)),
    "deg2rad": (torch.deg2rad, mp.radians, (2.3,)),
    "rad2deg": (torch.rad2deg, mp.degrees, (2.3,)),
    "gelu": (functional.gelu, lambda x: x * mp.ncdf(x), (0.0, -1.0, 3.0)),
    "gelu by tanh": (
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda x: x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3))),
        (0.0, 2.0),
    ),
    "silu": (functional.silu, lambda x: x / (1 + mp.exp(-x)), (0.0, -2.0)),
    "mish": (functional.mish, lambda x: x * mp.tanh(mp.log1p(mp.exp(x))), (0.0, 2.0)),
    "softplus": (functional.softplus, lambda x: mp.log1p(mp.exp(x)), (-5.0, 2.0)),
    "softplus of another beta": (lambda x: functional.softplus(x, 3.0), lambda x: mp.log1p(mp.exp(3 * x)) / 3, (0.5,)),
    "elu": (functional.elu, mp.expm1, (-0.7,)),
    "celu": (lambda x: functional.celu(x, 2.0), lambda x: 2 * mp.expm1(x / 2), (-0.7,)),
    "softsign": (functional.softsign, lambda x: x / (1 + x), (0.7,)),
    "tanhshrink": (functional.tanhshrink, lambda x: x - mp.tanh(x), (0.05, 2.0)),
    "nan_to_num": (torch.nan_to_num, lambda x: x, (0.7,)),
    "power": (lambda x: x**2.5, lambda x: mp.power(x, 2.5), (0.7,)),
    "cube": (lambda x: x**3, lambda x: x**3, (0.0, -1.0)),
    "negative power": (lambda x: x**-2, lambda x: x**-2, (0.7,)),
    "exponential": (lambda x: 1.7**x, lambda x: mp.power(1.7, x), (0.7,)),
    "power of itself": (lambda x: x**x, lambda x: mp.power(x, x), (0.7,)),
    "hypot": (lambda x: torch.hypot(x, 1 - x), lambda x: mp.hypot(x, 1 - x), (0.7,)),
    "atan2": (lambda x: torch.atan2(x, -1 - x), lambda x: mp.atan2(x, -1 - x), (0.7, 3.0)),
    "logaddexp": (lambda x: torch.logaddexp(x, -x), lambda x: mp.log(mp.exp(x) + mp.exp(-x)), (0.7,)),
    "xlogy": (lambda x: torch.xlogy(x, 1 + x), lambda x: x * mp.log(1 + x), (0.7,)),
    "polygamma": (lambda x: torch.polygamma(2, x), lambda x: mp.polygamma(2, x), (0.7,)),
    "a fraction": (lambda x: torch.sin(x) / (1 + x * x), lambda x: mp.sin(x) / (1 + x * x), (0.7,)),
}


def test_every_elementary_function_is_tested():
    assert set(ELEMENTARY) <= set(FUNCTIONS)
    assert set(ELEMENTARY) <= {each.name for each in functions_of_kind(Kind.POINTWISE)}


def assert_series_are_mpmaths(name, order):
    f, exact, points = FUNCTIONS[name]
    rest = [0.3, -0.2, 0.1, *[0.0] * (order - 3)]
    for point in points:
        expected = mpmath_series(exact, [point, *rest], order)
        value, found = jet(f, (number(point),), ([number(each) for each in rest],), normalized=True)
        size = max(map(abs, expected))
        for k, (got, right) in enumerate(zip([value, *found], expected, strict=True)):
            # Relative to the coefficient, or to the largest coefficient if terms cancel.
            assert math.isclose(got.item(), right, rel_tol=1e-12, abs_tol=1e-13 * size), (name, point, k)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_series_match_mpmath(name):
    assert_series_are_mpmaths(name, 3)


# Up to order four, the rules use powers of the change; above, they use equations.
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_long_series_match_mpmath(name):
    assert_series_are_mpmaths(name, 10)


SATURATED = {
    "tanh": (torch.tanh, mp.tanh, (18.0, -25.0)),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mp.exp(-x)), (-40.0,)),
    "softplus": (functional.softplus, lambda x: mp.log1p(mp.exp(x)), (-40.0,)),
    "logsigmoid": (functional.logsigmoid, lambda x: -mp.log1p(mp.exp(-x)), (40.0,)),
    "erfc": (torch.erfc, mp.erfc, (8.0,)),
    "ndtr": (torch.special.ndtr, mp.ncdf, (-8.0,)),
}


@pytest.mark.parametrize("name", SATURATED)
def test_small_derivatives_keep_their_digits(name):
    f, exact, points = SATURATED[name]
    for point in points:
        expected = mpmath_series(exact, [point, 1.0], 5)
        one, zero = number(1.0), number(0.0)
        _, found = jet(f, (number(point),), ([one, *[zero] * 4],), normalized=True)
        for got, right in zip(found, expected[1:], strict=True):
            assert math.isclose(got.item(), right, rel_tol=1e-11), (name, point)


def test_ties_and_kinks_match_torch():
    zero, one = number(0.0), number(1.0)
    half = (number(0.5), number(0.0))
    assert jet(lambda x: torch.maximum(x, 0 * x), (zero,), ([one, zero],))[1] == half
    assert jet(torch.abs, (zero,), ([one],))[1] == (number(0.0),)
    assert jet(functional.relu, (zero,), ([one],))[1] == (number(0.0),)
    assert jet(lambda x: torch.clamp(x, min=0.0), (zero,), ([one],))[1] == (number(1.0),)
    assert jet(lambda x: torch.clamp(x, min=0 * x), (zero,), ([one],))[1] == (number(1.0),)


def test_softplus_at_its_threshold_matches_torch():
    """The first derivative at the threshold is the left one, and higher derivatives are zero."""
    one, zero = number(1.0), number(0.0)
    for x, curvature in ((20.0, 0.0), (19.999, None), (20.001, 0.0)):
        value, (slope, second) = jet(functional.softplus, (number(x),), ([one, zero],))
        assert value == functional.softplus(number(x))
        assert math.isclose(slope.item(), 1 / (1 + math.exp(-x)) if x <= 20 else 1.0, rel_tol=1e-15)
        below = math.exp(-x) / (1 + math.exp(-x)) ** 2
        assert math.isclose(second.item(), below if curvature is None else curvature, rel_tol=1e-12)


def test_logaddexp_of_infinities_matches_limits():
    """The derivative by the larger argument is 1; for equal arguments both derivatives are 1/2."""
    inf = math.inf
    for a, b, weight in ((inf, -inf, 1.0), (-inf, inf, 0.0), (-inf, -inf, 0.5), (inf, inf, 0.5), (1.0, -inf, 1.0)):
        value, (slope,) = jet(torch.logaddexp, (number(a), number(b)), ([number(1.0)], [number(3.0)]))
        assert (value, slope) == (torch.logaddexp(number(a), number(b)), number(weight + 3 * (1 - weight)))


def test_float32_series_are_accurate():
    """Functions of softplus keep their accuracy in float32."""
    x, one = torch.tensor(-3.0), torch.tensor(1.0)
    for f in (
        functional.mish,
        functional.logsigmoid,
        lambda x: torch.logaddexp(x, 2 * x),
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.tensor(0.3)),
        lambda x: functional.soft_margin_loss(x, torch.tensor(-1.0)),
    ):
        _, found = jet(f, (x,), ([one, 0 * one],))
        _, right = jet(f, (x.double(),), ([one.double(), 0 * one.double()],))
        for got, exact in zip(found, right, strict=True):
            assert got.dtype == torch.float32
            assert math.isclose(got.item(), exact.item(), rel_tol=1e-5)


# Functions of one or two numbers, the point, the direction, and the value and derivative there.
EXTREMES = {
    "hypot of large numbers": (torch.hypot, (3e200, 4e200), (1.0, 1.0), (5e200, 1.4)),
    "hypot of small numbers": (torch.hypot, (3e-200, 4e-200), (1.0, 1.0), (5e-200, 1.4)),
    "a small power": (torch.pow, (1e-200, 1.0), (1.0, 0.0), (1e-200, 1.0)),
    "a power of 0": (torch.pow, (0.0, 1.0), (1.0, 1.0), (0.0, 1.0)),
    "a power of a negative number": (lambda x, y: torch.pow(x, y) * 1, (-2.0, 3.0), (0.0, 0.0), (-8.0, None)),
    "0 to the power": (lambda x: torch.pow(0.0, x), (2.0,), (1.0,), (0.0, 0.0)),
    "an angle at the origin": (torch.atan2, (0.0, 0.0), (1.0, 1.0), (0.0, None)),
    "a number in place of infinity": (lambda x: torch.nan_to_num(x, posinf=2.0), (math.inf,), (1.0,), (2.0, 0.0)),
    "a number in place of NaN": (lambda x: torch.nan_to_num(x.log(), 3.0), (-1.0,), (1.0,), (3.0, 0.0)),
    "0 log 0": (torch.xlogy, (0.0, 0.0), (1.0, 1.0), (0.0, None)),
    "softplus of infinity": (functional.softplus, (math.inf,), (1.0,), (math.inf, 1.0)),
    "an arctangent far out": (torch.atan, (1e200,), (1.0,), (math.pi / 2, 0.0)),
    "hardswish of infinity": (functional.hardswish, (math.inf,), (1.0,), (math.inf, 1.0)),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_arguments_match(name):
    """Values equal torch's, even where the formula of the derivative is undefined; None marks a missing derivative."""
    f, point, direction, (value, slope) = EXTREMES[name]
    got, (first,) = jet(f, tuple(map(number, point)), [[number(each)] for each in direction])
    assert math.isclose(got.item(), value, rel_tol=1e-15)
    assert math.isnan(first.item()) if slope is None else math.isclose(first.item(), slope, rel_tol=1e-14)


@pytest.mark.parametrize("size", [1e200, 1e-100])
def test_hypot_second_derivative_at_extreme_sizes(size):
    """The second derivative by x is y^2 / r^3, for a triangle with sides 3, 4 and 5."""
    one = number(1.0)
    _, (_, second) = jet(torch.hypot, (3 * size * one, 4 * size * one), ([one, 0 * one], [0 * one, 0 * one]))
    assert math.isclose(second.item(), 16 / 125 / size, rel_tol=1e-14)


def test_huber_at_its_joint_matches_torch():
    one = number(1.0)
    _, (slope, second) = jet(lambda x: functional.huber_loss(x, 0 * one), (one,), ([one, 0 * one],))
    assert (slope, second) == (one, one)


@pytest.mark.parametrize("scale", [1e9, 1e12, 1e15])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "group_norm"])
def test_normalization_of_large_numbers_in_float32(name, scale):
    f = {
        "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (3,), eps=1e-6)[0],
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (3,))[0],
        "group_norm": lambda x: torch.nn.functional.group_norm(torch.cat([x, 2 * x.flip(0)])[None], 2)[0, 0],
    }[name]
    x, v = scale * torch.tensor([1.3, -0.7, 0.4]), scale * torch.tensor([1.0, 0.3, 0.2])
    found = directional_derivatives(f, x, v, order=3)
    # The functions are of degree 0, so that numbers of size 1 have the same derivatives along the scaled direction.
    expected = directional_derivatives(f, (x / scale).double(), (v / scale).double(), order=3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
