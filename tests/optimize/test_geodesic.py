"""Tests of Levenberg-Marquardt with geodesic acceleration: fewer Jacobians in narrow valleys, and SciPy's minima."""

import numpy as np
import pytest
import scipy.optimize as so
import torch

import hodiff
from hodiff.optimize import least_squares

D = torch.float64
T = torch.linspace(0, 4, 40, dtype=D)
DATA = 2 * torch.exp(-T) + torch.exp(-0.3 * T) + 0.01 * torch.sin(37 * T)


def canyon(x, steepness=1000.0):
    return torch.stack([steepness * (x[1] - x[0] ** 2), 1 - x[0]])


def decays(p):
    return p[0] * torch.exp(-p[2] * T) + p[1] * torch.exp(-p[3] * T) - DATA


def powell(x):
    """Compute residuals whose Jacobian is singular at the minimum."""
    return torch.stack([x[0] + 10 * x[1], 5**0.5 * (x[2] - x[3]), (x[1] - 2 * x[2]) ** 2, 10**0.5 * (x[0] - x[3]) ** 2])


@pytest.mark.slow
def test_narrow_canyon_takes_fewer_jacobians():
    start = torch.tensor([-1.0, 1.0], dtype=D)
    bent = least_squares(canyon, start, method="lm-geodesic")
    straight = least_squares(canyon, start, method="lm-geodesic", acceleration=0, max_nfev=1000)
    by_minpack = least_squares(canyon, start, method="lm")
    for found in (bent, straight):
        assert found.success
        torch.testing.assert_close(found.x, torch.ones(2, dtype=D), rtol=0, atol=1e-9)
    assert bent.njev < straight.njev / 4
    assert bent.njev < by_minpack.njev / 4
    assert straight.naev == 0 < bent.naev


@pytest.mark.parametrize("scale", [1.0, "jac"])
@pytest.mark.parametrize(
    ("f", "start"), [(decays, [1.0, 1.0, 2.0, 0.1]), (powell, [3.0, -1.0, 0.0, 1.0])], ids=["decays", "powell"]
)
def test_minima_match_scipy(f, start, scale):
    found = least_squares(f, torch.tensor(start, dtype=D), method="lm-geodesic", x_scale=scale, gtol=1e-12)
    expected = so.least_squares(lambda x: f(torch.from_numpy(x)).numpy(), start, gtol=1e-12)
    assert found.success
    np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.x.numpy(), expected.x, rtol=1e-5, atol=1e-2 if f is powell else 0)
    np.testing.assert_allclose(found.fun.numpy(), f(found.x).numpy())
    torch.testing.assert_close(found.jac, hodiff.jacobian(f)(found.x))
    torch.testing.assert_close(found.grad, found.jac.T @ found.fun)


def test_step_matches_the_paper():
    """One step matches normal equations and a difference along the velocity."""
    x = torch.tensor([-0.5, 0.4], dtype=D)

    def f(x):
        return canyon(x, 3.0)

    found = least_squares(f, x, method="lm-geodesic", max_nfev=2, acceleration=1e9)
    J, r = hodiff.jacobian(f)(x), f(x)
    normal = J.T @ J + 1e-3 * torch.linalg.matrix_norm(J, 2) ** 2 * torch.eye(2, dtype=D)
    v = -torch.linalg.solve(normal, J.T @ r)
    second = (f(x + 1e-4 * v) - 2 * r + f(x - 1e-4 * v)) / 1e-8
    a = -torch.linalg.solve(normal, J.T @ second)
    torch.testing.assert_close(found.x, x + v + a / 2, rtol=1e-6, atol=0)


def test_fewer_residuals_than_unknowns_and_pytrees_work():
    start = {"a": torch.ones(2), "b": torch.tensor(3.0, dtype=D)}
    found = least_squares(lambda p: [p["a"].sum() * p["b"] - 1, p["b"] - 2], start, method="lm-geodesic")
    assert found.success
    assert found.cost < 1e-10
    assert found.x["a"].dtype is torch.float32
    torch.testing.assert_close(found.x["b"], torch.tensor(2.0, dtype=D), atol=1e-4, rtol=0)


def test_undefined_regions_are_avoided():
    """log and sqrt are undefined below zero, and sqrt has no second derivative at zero."""
    found = least_squares(
        lambda x: torch.cat([x.log() + 3, x.sqrt() - 0.2]), torch.ones(2, dtype=D), method="lm-geodesic"
    )
    expected = so.least_squares(
        lambda x: np.concatenate([np.log(x) + 3, np.sqrt(x) - 0.2]), [1.0, 1.0], bounds=(1e-9, 9)
    )
    assert found.success
    np.testing.assert_allclose(found.x.numpy(), expected.x, rtol=1e-5)
    # At the start the first derivative is finite, but the second is not.
    found = least_squares(lambda x: x**1.5 + x - 2, torch.zeros(1, dtype=D), method="lm-geodesic")
    assert found.success
    torch.testing.assert_close(found.x, torch.ones(1, dtype=D), rtol=0, atol=1e-6)
    with pytest.raises(hodiff.InputError, match="finite"):
        least_squares(lambda x: x.log(), -torch.ones(2, dtype=D), method="lm-geodesic")
    found = least_squares(lambda x: x.sqrt(), torch.zeros(2, dtype=D), method="lm-geodesic")
    assert not found.success
    assert "Jacobian is not finite" in found.message


def test_limits_are_reported():
    start = torch.tensor([-1.0, 1.0], dtype=D)
    found = least_squares(canyon, start, method="lm-geodesic", max_nfev=5)
    assert (found.nfev, found.status, found.success) == (5, 0, False)
    assert "maximum number" in found.message
    # Without tolerances, iterate until rounding.
    found = least_squares(
        decays, torch.tensor([1.0, 1.0, 2.0, 0.1], dtype=D), method="lm-geodesic", ftol=None, gtol=None
    )
    assert (found.status, found.success) == (3, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bounds": (0, 1)}, "'lm-geodesic' supports no bounds"),
        ({"acceleration": -1}, "acceleration: expected a nonnegative number"),
        ({"x_scale": -1.0}, "x_scale: expected positive numbers"),
    ],
)
def test_rejects_bad_arguments(change, words):
    with pytest.raises(hodiff.InputError, match=words):
        least_squares(decays, torch.ones(4, dtype=D), method="lm-geodesic", **change)
