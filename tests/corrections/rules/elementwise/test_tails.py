"""Derivatives of elementwise functions and losses in tails, to third order by every route, against mpmath."""

import random

import pytest
import torch
from corrections.tails import ORDERS, TAILS, exact, of_middling_size, points, truths, ulps

import hodiff
from hodiff.taylor import jet

ULPS = 50.0
# Functions that switch between formulas, or contain such functions, lose a few more bits.
MORE = {
    **dict.fromkeys(("tanh", "tanhshrink", "gelu"), 2e3),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cross_entropy"), 200.0),
    "special.erfcx": 500.0,
    "special.log_ndtr": 5e3,
    "special.ndtri": 2e3,
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def points_in_range(name, dtype):
    info = torch.finfo(dtype)
    return [p for p in points(name) if 10 * info.tiny < abs(p) < info.max / 10]


def assert_accurate(name, dtype, order, given, got):
    for point, number in zip(given, got.tolist(), strict=True):
        error = ulps(name, point, order, number, dtype)
        assert error <= MORE.get(name, ULPS), f"order {order} at {point}: {number} is {error:.3g} ulps off"


def summed(name):
    return lambda x: TAILS[name][0](x).sum()


@pytest.mark.one_in(15)
@DTYPES
@pytest.mark.parametrize("name", TAILS)
def test_each_point_alone_matches_mpmath(name, dtype):
    """Rules branch on the elements, so each element must also be correct in a tensor of its own."""
    f = summed(name)
    for point in points_in_range(name, dtype):
        x = torch.tensor([point], dtype=dtype, requires_grad=True)
        with hodiff.corrected():
            y = f(x)
            for order in ORDERS:
                # Results without a graph have derivatives of zero.
                (y,) = torch.autograd.grad(y.sum(), x, create_graph=True) if y.requires_grad else (torch.zeros_like(x),)
                assert_accurate(name, dtype, order, [point], y.detach())


@pytest.mark.one_in(150)
@DTYPES
@pytest.mark.parametrize("name", TAILS)
def test_all_points_by_every_route_match_mpmath(name, dtype):
    f, given = summed(name), [p for p in points_in_range(name, dtype) if of_middling_size(name, p)]
    x = torch.tensor(given, dtype=dtype)
    one = torch.ones_like(x)
    for route in hodiff.ROUTES:
        assert_accurate(name, dtype, 2, given, hodiff.hvp(f, x, one, route=route))
    found = jet(TAILS[name][0], (x,), ([one, 0 * x, 0 * x],))[1]
    for order in ORDERS:
        assert_accurate(name, dtype, order, given, found[order - 1])


def test_saved_answers_cover_exactly_the_tested_points():
    assert {name: list(rows) for name, rows in truths().items()} == {name: [*map(repr, points(name))] for name in TAILS}


@pytest.mark.slow
def test_sample_of_saved_answers_matches_mpmath():
    for name in random.Random(0).sample([*TAILS], 12):
        point = random.Random(name).choice(points(name))
        assert exact(name, point) == truths()[name][repr(point)], (name, point)
