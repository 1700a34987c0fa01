"""Finite differences and their error estimates, against closed forms."""

import math

import pytest
import torch
from cases import rosenbrock
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import rosen_hess_prod

from hodiff import InputError
from hodiff.checks import central_differences, hvp_differences
from hodiff.checks.oracles.finite_differences import _has_kink

X = torch.tensor([-0.4, 0.7, 1.1], dtype=torch.float64)
V = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def test_hvp_of_rosenbrock_is_within_its_error_estimate():
    estimate = hvp_differences(rosenbrock, X, V)
    expected = torch.from_numpy(rosen_hess_prod(X.numpy(), V.numpy()))
    actual = (estimate.value - expected).abs().max()
    assert actual <= max(10 * estimate.error, 1e-9)
    assert estimate.error < 1e-6
    assert estimate.smooth


def test_hvp_keeps_the_structure_of_a_pytree():
    x = {"w": torch.ones(2, 2, dtype=torch.float64), "b": torch.tensor(2.0, dtype=torch.float64)}
    v = {"w": torch.eye(2, dtype=torch.float64), "b": torch.tensor(0.0, dtype=torch.float64)}
    value = hvp_differences(lambda p: p["b"] * (p["w"] ** 2).sum(), x, v).value
    torch.testing.assert_close(value["w"], 4 * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(value["b"], torch.tensor(4.0, dtype=torch.float64))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.floats(-6.0, 6.0), st.floats(-5.0, 5.0))
def test_error_estimate_holds_over_many_scales(exponent, point):
    """The rate of the function covers six orders of magnitude."""
    rate = 10.0 ** (exponent / 2)
    x = torch.tensor([point / rate], dtype=torch.float64)
    estimate = central_differences(lambda x: torch.sin(rate * x), x, torch.ones_like(x))
    actual = abs(float(estimate.value) - rate * math.cos(rate * float(x)))
    assert actual <= 10 * estimate.error + 1e-9 * rate


def test_float32_noise_raises_the_error_estimate():
    estimate = central_differences(lambda x: torch.sin(x.float()).double(), X, V)
    assert 1e-9 < estimate.error < 1e-2


@pytest.mark.parametrize(("f", "smooth"), [(torch.abs, False), (torch.relu, False), (torch.sinh, True)])
def test_kinks_are_detected(f, smooth):
    zero = torch.zeros(1, dtype=torch.float64)
    assert central_differences(f, zero, zero + 1).smooth is smooth


def test_points_outside_the_domain_raise_the_error_estimate():
    x = torch.tensor([1e-3], dtype=torch.float64)
    assert abs(float(central_differences(torch.log, x, x / x).value) - 1e3) < 1e-5
    assert central_differences(torch.sqrt, 0 * x, x / x).error == math.inf

    def raising(x):
        if x < 0:
            raise ValueError("negative")
        return x.sqrt()

    assert abs(float(central_differences(raising, x, x / x).value) - 0.5 / 1e-3**0.5) < 1e-6


@pytest.mark.parametrize("v", [torch.zeros(2, dtype=torch.float64), [V]])
def test_rejects_direction_of_another_structure(v):
    with pytest.raises(InputError, match="central_differences: v"):
        central_differences(torch.sin, X, v)


def test_stops_early_once_converged():
    calls = []

    def counted(x):
        calls.append(x)
        return x.exp()

    estimate = central_differences(counted, X[:1], X[:1] / X[:1])
    assert abs(float(estimate.value) - math.exp(float(X[0]))) < 1e-11
    assert len(calls) <= 16


def test_small_kink_beside_curvature_is_detected():
    """Central differences of |x| vanish by symmetry at every step, so they seem to converge at once."""
    zero = torch.zeros(1, dtype=torch.float64)
    assert not central_differences(lambda x: 1e3 * x**2 + 0.05 * x.abs(), zero, zero + 1).smooth


def test_rounding_is_not_taken_for_a_kink():
    """Rounding errors of a few units in the last place may shrink with the step, as the gap at a kink does."""
    one, eps = torch.ones(1, dtype=torch.float64), torch.finfo(torch.float64).eps
    pairs = {1e-6: (one + 32 * eps, one), 1e-6 / 16: (one + 2 * eps, one)}
    assert not _has_kink(one, pairs, 0.0, eps)
    assert _has_kink(one, {h: (one + h, one + h) for h in pairs}, 0.0, eps)
