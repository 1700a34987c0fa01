"""Tests of the line search of Hager and Zhang on the test functions of Moré and Thuente."""

import math

import pytest

from hodiff.optimize.line_search import Trial, Wolfe, line_search

# Value and derivative of functions that decrease at 0; the last is not finite beyond 3.
FUNCTIONS = {
    "pole": (lambda t: -t / (t**2 + 2), lambda t: (t**2 - 2) / (t**2 + 2) ** 2),
    "flat": (lambda t: (t + 0.004) ** 5 - 2 * (t + 0.004) ** 4, lambda t: 5 * (t + 0.004) ** 4 - 8 * (t + 0.004) ** 3),
    "wall": (
        lambda t: (t - 2) ** 2 - math.log(3 - t) if t < 3 else math.nan,
        lambda t: 2 * (t - 2) + 1 / (3 - t) if t < 3 else math.nan,
    ),
}
FUNCTIONS["waves"] = (
    lambda t: (t - 1) ** 2 + 0.1 * math.sin(20 * t) - 3 * t,
    lambda t: 2 * (t - 1) + 2 * math.cos(20 * t) - 3,
)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("step", [1e-3, 0.1, 1.0, 10.0, 1e3])
def test_step_satisfies_wolfe_conditions(name, step):
    value, slope = FUNCTIONS[name]
    calls = []

    def evaluate(t):
        calls.append(t)
        return Trial(t, value(t), slope(t))

    wolfe = Wolfe(evaluate(0.0), 0.1, 0.5)
    found = line_search(evaluate, wolfe, step)
    assert slope(found.step) >= 0.5 * slope(0)
    assert value(found.step) <= value(0) + 0.1 * found.step * slope(0)
    assert len(calls) < 25


def test_approximate_conditions_apply_near_the_minimum():
    """Derivatives find the minimum if values are equal up to rounding."""
    start = 1e-9

    def evaluate(t):
        # With x = start - t, the value 1 + x^2 is 1 in float64.
        x = start - t
        return Trial(t, 1 + x**2, -2 * x)

    wolfe = Wolfe(evaluate(0.0), 0.1, 0.01)
    assert evaluate(0.0).value == evaluate(start).value
    assert abs(line_search(evaluate, wolfe, 1e-10).step - start) < 0.02 * start


def test_increasing_function_has_no_step():
    assert line_search(lambda t: Trial(t, t, 1.0), Wolfe(Trial(0.0, 0.0, -1.0))) is None


def test_unbounded_function_returns_the_lowest_trial():
    """The search returns the lowest trial of an unbounded function."""
    found = line_search(lambda t: Trial(t, -t, -1.0), Wolfe(Trial(0.0, 0.0, -1.0), 0.1, 0.5))
    assert found.value < -1e6
