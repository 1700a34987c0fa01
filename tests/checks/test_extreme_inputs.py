"""Inputs of size 1e6 and 1e-6: no false alarms, wrong rules are detected, and unstable formulas are named."""

import pytest
import torch
from custom_functions import custom

import hodiff
from hodiff.checks import central_differences


def point(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


SMOOTH = {
    "sin": (torch.sin, 1e6),
    "tanh": (torch.tanh, 1e6),
    "square": (torch.square, 1e6),
    "cube": (lambda x: x**3, 1e3),
    "log1p": (torch.log1p, 1e8),
    "reciprocal, large": (torch.reciprocal, 1e6),
    "reciprocal, small": (torch.reciprocal, 1e-6),
    "sqrt": (torch.sqrt, 1e-8),
    "log": (torch.log, 1e-8),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_pass(name):
    f, extreme = SMOOTH[name]
    assert hodiff.check(f, point(extreme, 0.5), vmap=False).ok


# Sine whose second derivative is off by 0.001
WrongSine = custom(
    "WrongSine",
    lambda x: x.sin(),
    lambda ctx, g: g * (ctx.saved_tensors[0].cos() + 1e-3 * (ctx.saved_tensors[0] - ctx.saved_tensors[0].detach())),
)


def test_wrong_rule_is_found_at_large_inputs():
    report = hodiff.check(WrongSine.apply, point(1e6, 0.5), vmap=False)
    assert {"HD104"} == set(report.codes) - {"HD401"}, report


def naive_softplus(x):
    return torch.log(1 + torch.exp(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "x", "code"),
    [
        (naive_softplus, (1000.0, 0.5), "HD111"),  # exp(x) overflows
        (naive_softplus, (500.0, 0.5), "HD111"),  # exp(x)^-2, a factor of the second derivative, underflows
        (lambda x: torch.sqrt(x**2 + 1) - x.abs(), (1e6,), "HD118"),
    ],
)
def test_unstable_formula_is_named(f, x, code):
    report = hodiff.check(f, point(*x), vmap=False)
    errors = {finding.code for finding in report.findings if finding.severity == "error"}
    assert errors == {code}, report


@pytest.mark.parametrize(("f", "slope", "x"), [(torch.sin, torch.cos, 1e6), (torch.log, torch.reciprocal, 1e-8)])
def test_differences_choose_small_steps(f, slope, x):
    estimate = central_differences(f, point(x), point(1.0))
    assert estimate.smooth
    assert abs(float(estimate.value / slope(point(x))) - 1) < 1e-6
    assert estimate.error < 1e-5 * float(estimate.value.abs())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("f", "point"), [(torch.expm1, -40.0), (torch.nn.functional.silu, 40.0)])
def test_tails_that_torch_loses_are_found_where_differences_vanish(f, point):
    report = hodiff.check(f, (torch.tensor([point], dtype=torch.float64),), order=2, vmap=False, scipy=False)
    assert report.ok
    assert report.codes == ("HD410",)


def test_tails_that_torch_keeps_have_no_finding():
    for f, point in ((torch.expm1, 3.0), (torch.nn.functional.silu, -40.0), (torch.tanh, 3.0)):
        report = hodiff.check(f, (torch.tensor([point], dtype=torch.float64),), order=2, vmap=False, scipy=False)
        assert not report.findings


@pytest.mark.parametrize("start", [0.3, 0.31])
def test_underestimated_scipy_error_is_no_finding(start):
    # Beside 1.6, the curvature has three correct digits. At 0.3, SciPy's error estimate is a hundred times too small.
    def f(x):
        return 1.3 + start + 1e-5 * (3 * x).sin().sum() + 1e-4 * x.cos().sum()

    assert hodiff.check(f, point(start), vmap=False).ok
