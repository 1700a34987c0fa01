"""Value and three derivatives at extreme numbers against mpmath at 50 digits, at infinities, NaN and empty tensors."""

import math

import pytest
import torch
from functions.case import Extremes, FunctionCase
from functions.catalogue import CASES
from functions.extremes import DIGITS, derivatives, errors_in_ulps, inside
from hypothesis import example, given
from hypothesis import strategies as st
from mpmath import mp

EXTREMES = [
    pytest.param(case, extremes, id=f"{case.name}-argument-{extremes.argnum}-{position}")
    for case in CASES
    for position, extremes in enumerate(case.extremes)
]


@pytest.fixture(autouse=True)
def _precision():
    with mp.workdps(DIGITS):
        yield


def assert_accurate(case: FunctionCase, extremes: Extremes, point: float) -> None:
    errors = errors_in_ulps(case, extremes, point)
    for order, (error, limit) in enumerate(zip(errors, extremes.ulps, strict=True)):
        assert error <= limit, f"order {order} at {point!r}: {error:.3g} ulps, {limit} allowed"


@pytest.mark.parametrize(("case", "extremes"), EXTREMES)
def test_accurate_at_extreme_numbers(case, extremes):
    for point in inside(tuple(tuple(pair) for pair in extremes.domain)):
        assert_accurate(case, extremes, point)


@pytest.mark.parametrize(("case", "extremes"), EXTREMES)
def test_accurate_anywhere(case, extremes):
    low, high = max(extremes.domain, key=lambda pair: min(pair[1], 1e4) - max(pair[0], -1e4))
    bounds = {"min_value": max(low, -1e4), "max_value": min(high, 1e4), "exclude_min": True, "exclude_max": True}

    @given(st.floats(**bounds, allow_subnormal=False))
    @example(max(bounds["min_value"] + 1e-3, -1.0))
    def accurate(point):
        assert_accurate(case, extremes, point)

    accurate()


@pytest.mark.parametrize(("case", "extremes"), EXTREMES)
def test_limits(case, extremes):
    for point, expected in extremes.limits.items():
        got = derivatives(case, extremes, point)
        for order, (a, b) in enumerate(zip(got, expected, strict=False)):
            same = math.isnan(a) if math.isnan(b) else a == b
            assert same, f"order {order} at {point!r}: expected {b}, got {a}"


@pytest.mark.parametrize(("case", "extremes"), [each for each in EXTREMES if each.values[0].nan_propagates])
def test_nan_stays_nan(case, extremes):
    """A NaN that became a number would hide an error upstream."""
    assert math.isnan(derivatives(case, extremes, math.nan)[0])


@pytest.mark.parametrize("case", [case for case in CASES if case.empty], ids=lambda case: case.name)
def test_empty(case):
    inputs = case.empty(torch.float64)
    leaves = [x.requires_grad_() for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    output = case.function(*inputs)
    gradients = torch.autograd.grad(output.sum(), leaves, create_graph=True)
    assert [g.shape for g in gradients] == [x.shape for x in leaves]
    for g in gradients:
        assert not g.isnan().any()
        # Of no outputs; memory that nobody wrote need not be NaN.
        assert output.numel() or not g.any()
