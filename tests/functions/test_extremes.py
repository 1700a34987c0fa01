"""Tests of values and three derivatives at extreme numbers, against mpmath, at infinities, NaN and without elements.

A file stores mpmath's results, computed with 50 digits; these tests recompute some, and the slow tests all of them.
"""

import math
import random

import pytest
import torch
from functions.case import Extremes, FunctionCase
from functions.catalogue import CASES
from functions.extremes import DIGITS, derivatives, each_extremes, errors_in_ulps, points, truth, truths
from hypothesis import example, given
from hypothesis import strategies as st
from mpmath import mp

EXTREMES = [pytest.param(case, extremes, id=name) for name, case, extremes in each_extremes()]
NAMED = pytest.mark.parametrize(
    ("name", "case", "extremes"), [pytest.param(*each, id=each[0]) for each in each_extremes()]
)


@pytest.fixture(autouse=True)
def _precision():
    with mp.workdps(DIGITS):
        yield


def assert_accurate(case: FunctionCase, extremes: Extremes, point: float, exact: list) -> None:
    errors = errors_in_ulps(case, extremes, point, exact)
    for order, (error, limit) in enumerate(zip(errors, extremes.ulps, strict=True)):
        # The file's 20 digits are exact to 0.0003 ulps.
        assert round(error, 3) <= limit, f"order {order} at {point!r}: {error:.3g} ulps, {limit} allowed"


def assert_on_file(name: str, extremes: Extremes, point: float) -> None:
    for order, (stored, live) in enumerate(zip(truths()[name][point], truth(extremes, point), strict=True)):
        assert abs(stored - live) <= abs(live) * mp.mpf("1e-19"), f"order {order} at {point!r}"


@pytest.mark.one_in(20)
@NAMED
def test_derivatives_at_extreme_numbers_match_mpmath(name, case, extremes):
    for point, exact in truths()[name].items():
        assert_accurate(case, extremes, point, exact)


def test_saved_answers_cover_exactly_the_tested_points():
    """After a change, `python tests/functions/write_truths.py` rewrites the file."""
    asked = {name: set(points(name, extremes)) for name, _, extremes in each_extremes()}
    assert {name: set(rows) for name, rows in truths().items()} == asked


@pytest.mark.slow
def test_sample_of_saved_answers_matches_mpmath():
    rng = random.Random(0)
    for name, _, extremes in each_extremes():
        assert_on_file(name, extremes, rng.choice(points(name, extremes)))


@pytest.mark.slow
@NAMED
def test_saved_answers_match_mpmath(name, case, extremes):
    for point in points(name, extremes):
        assert_on_file(name, extremes, point)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "extremes"), EXTREMES)
def test_derivatives_at_random_points_match_mpmath(case, extremes):
    low, high = max(extremes.domain, key=lambda pair: min(pair[1], 1e4) - max(pair[0], -1e4))
    bounds = {"min_value": max(low, -1e4), "max_value": min(high, 1e4), "exclude_min": True, "exclude_max": True}

    @given(st.floats(**bounds, allow_subnormal=False))
    @example(max(bounds["min_value"] + 1e-3, -1.0))
    def accurate(point):
        assert_accurate(case, extremes, point, truth(extremes, point))

    accurate()


@pytest.mark.parametrize(("case", "extremes"), EXTREMES)
def test_derivatives_at_infinities_match_limits(case, extremes):
    for point, expected in extremes.limits.items():
        got = derivatives(case, extremes, point)
        for order, (a, b) in enumerate(zip(got, expected, strict=False)):
            # The last bit depends on the kernel.
            same = math.isnan(a) if math.isnan(b) else a == b or math.isclose(a, b, rel_tol=2**-51)
            assert same, f"order {order} at {point!r}: expected {b}, got {a}"


@pytest.mark.parametrize(("case", "extremes"), [each for each in EXTREMES if each.values[0].nan_propagates])
def test_nan_input_gives_nan(case, extremes):
    """A NaN that becomes a number would hide an earlier error."""
    assert math.isnan(derivatives(case, extremes, math.nan)[0])


@pytest.mark.parametrize("case", [case for case in CASES if case.empty], ids=lambda case: case.name)
def test_empty_inputs_have_empty_derivatives(case):
    inputs = case.empty(torch.float64)
    leaves = [x.requires_grad_() for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    output = case.function(*inputs)
    gradients = torch.autograd.grad(output.sum(), leaves, create_graph=True)
    assert [g.shape for g in gradients] == [x.shape for x in leaves]
    for g in gradients:
        assert not g.isnan().any()
        # The gradient of no outputs is zero. Uninitialized memory need not be NaN.
        assert output.numel() or not g.any()
