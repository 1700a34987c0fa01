"""Tests of `least_squares` against SciPy with a Jacobian by hand, and of its own contract."""

import numpy as np
import pytest
import scipy.optimize as so
import torch

import hodiff
from hodiff.derivatives import own_gradient
from hodiff.optimize import least_squares

D = torch.float64
T = torch.linspace(0, 3, 20, dtype=D)
DATA = 2.5 * torch.exp(-1.3 * T) + 0.05 * torch.sin(40 * T)
START = torch.tensor([1.0, 0.5], dtype=D)


def decay(p):
    return p[0] * torch.exp(-p[1] * T) - DATA


def by_hand(p):
    return p[0] * np.exp(-p[1] * T.numpy()) - DATA.numpy()


def jacobian(p):
    t = T.numpy()
    return np.stack([np.exp(-p[1] * t), -p[0] * t * np.exp(-p[1] * t)], 1)


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
@pytest.mark.parametrize("loss", ["linear", "soft_l1"])
def test_solutions_match_scipy_with_manual_jacobian(method, loss):
    if method == "lm" and loss != "linear":
        pytest.skip("MINPACK has no other loss")
    ours = least_squares(decay, START, method=method, loss=loss, f_scale=0.1)
    theirs = so.least_squares(by_hand, START.numpy(), jacobian, method=method, loss=loss, f_scale=0.1)
    assert ours.nfev == theirs.nfev
    np.testing.assert_allclose(ours.x.numpy(), theirs.x, rtol=1e-10)
    np.testing.assert_allclose(ours.cost, theirs.cost, rtol=1e-10)
    # This is the Jacobian of the residuals; SciPy scales its Jacobian by a robust loss.
    np.testing.assert_allclose(ours.jac.numpy(), jacobian(ours.x.numpy()), rtol=1e-8)
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad, atol=1e-8)


def test_lsmr_uses_jacobian_products_only():
    ours = least_squares(decay, START, tr_solver="lsmr")
    theirs = so.least_squares(by_hand, START.numpy(), jacobian)
    np.testing.assert_allclose(ours.x.numpy(), theirs.x, rtol=1e-5)
    assert isinstance(ours.jac, hodiff.JacobianOperator)
    np.testing.assert_allclose(ours.jac.to_dense().numpy(), jacobian(ours.x.numpy()), rtol=1e-10)


@pytest.mark.parametrize("method", ["trf", "dogbox"])
def test_bounds_and_pytrees_match(method):
    start = {"height": torch.ones((), dtype=D), "rate": torch.ones((), dtype=D)}
    found = least_squares(
        lambda p, t: [p["height"] * torch.exp(-p["rate"] * t) - DATA],
        start,
        T,
        method=method,
        bounds=({"height": torch.zeros((), dtype=D), "rate": torch.zeros((), dtype=D)}, 2.0),
    )
    expected = so.least_squares(by_hand, [1.0, 1.0], jacobian, bounds=(0, 2), method=method)
    np.testing.assert_allclose([found.x["height"], found.x["rate"]], expected.x, rtol=1e-6)
    assert found.active_mask["height"] == 1


def test_x_scale_matches_scipy():
    for scale in ("jac", torch.tensor([10.0, 1.0], dtype=D), 2.0):
        numbers = scale.numpy() if isinstance(scale, torch.Tensor) else scale
        ours = least_squares(decay, START, x_scale=scale)
        theirs = so.least_squares(by_hand, START.numpy(), jacobian, x_scale=numbers)
        assert ours.nfev == theirs.nfev
        np.testing.assert_allclose(ours.x.numpy(), theirs.x, rtol=1e-9)


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
def test_default_x_scale_matches_installed_scipy(method):
    """Unknowns of different sizes show the effect of the scales."""

    def by_hand(p):
        return p[0] * np.exp(-1e-3 * p[1] * T.numpy()) - DATA.numpy()

    def slopes(p):
        shape = np.exp(-1e-3 * p[1] * T.numpy())
        return np.stack([shape, -1e-3 * T.numpy() * p[0] * shape], 1)

    x0 = torch.tensor([1.0, 50.0], dtype=D)
    ours = least_squares(lambda p: p[0] * torch.exp(-1e-3 * p[1] * T) - DATA, x0, method=method)
    theirs = so.least_squares(by_hand, x0.numpy(), slopes, method=method)
    assert (ours.nfev, ours.njev) == (theirs.nfev, theirs.njev)
    np.testing.assert_allclose(ours.x.numpy(), theirs.x, rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "gn"}, "method: expected one of 'trf'"),
        ({"method": "lm", "bounds": (0, 1)}, "'lm' supports no bounds"),
        ({"loss": "l1"}, "loss: expected one of"),
        ({"f_scale": 0}, "f_scale: expected a positive number"),
        ({"x_scale": "auto"}, "x_scale: expected a number, 'jac'"),
        ({"max_nfev": 0}, "max_nfev: expected an int of 1 or more"),
        ({"args": (3.0,)}, "args: expected no argument of this name, unlike .* closes over them"),
        ({"jac": "2-point"}, "jac: expected no argument of this name, unlike .* exact derivatives"),
        ({"x_scale": "jac", "tr_solver": "lsmr"}, "x_scale: expected a number .* got 'jac'; pass .*tr_solver='exact'"),
        ({"tr_solver": "qr"}, "tr_solver: expected"),
        ({"x_scale": 0.0}, "x_scale: expected positive numbers, got 0"),
        ({"x_scale": -torch.ones_like(START)}, "x_scale: expected positive numbers, got -1"),
        ({"x_scale": torch.ones(7)}, "x_scale does not match at its only leaf"),
        ({"ftol": None, "xtol": None, "gtol": None}, "expected one of ftol, xtol and gtol to be"),
        ({"method": "lm", "gtol": None}, "expected all of ftol, xtol and gtol to be"),
        ({"bounds": (100, None)}, "bounds: expected a start within them"),
        ({"bounds": (-100, torch.tensor(float("nan")))}, "bounds: expected numbers, got nan"),
    ],
)
def test_rejects_bad_arguments(change, words):
    with pytest.raises(hodiff.InputError, match=words):
        least_squares(decay, START, **change)


def test_rejects_bad_residuals():
    with pytest.raises(hodiff.InputError, match="a tensor or a pytree of tensors"):
        least_squares(lambda p: 3.0, START)
    with pytest.raises(hodiff.InputError, match="finite"):
        least_squares(lambda p: decay(p).log(), START)
    with pytest.raises(hodiff.InputError, match="as many residuals as unknowns"):
        least_squares(lambda p: p[:1], START, method="lm")


@pytest.mark.parametrize(
    "form", [tuple, list, lambda sides: tuple(map(np.array, sides)), lambda sides: so.Bounds(*sides)]
)
def test_bounds_are_lower_and_upper_as_in_scipy(form):
    """Bounds of two unknowns could be mistaken for the pairs of `minimize`."""
    start, target = np.array([0.5, 2.5]), np.array([5.0, -5.0])
    expected = so.least_squares(lambda x: x - target, start, bounds=([0, 1], [2, 3])).x
    found = least_squares(
        lambda x: x - torch.from_numpy(target), torch.from_numpy(start), bounds=form(([0, 1], [2, 3]))
    )
    torch.testing.assert_close(found.x, torch.from_numpy(expected))


def test_rejects_bounds_without_interior():
    with pytest.raises(hodiff.InputError, match="expected lower bounds below the upper ones, got 1 between 1 and 1"):
        least_squares(lambda x: x - 3, torch.ones(2, dtype=torch.float64), bounds=(1, 1))


def test_start_on_a_bound_warns():
    """SciPy's default method may not move from a bound, and reports success."""
    start = torch.zeros(2, dtype=torch.float64)
    with pytest.warns(hodiff.HodiffWarning, match="x0: expected a point inside the bounds") as told:
        least_squares(lambda x: x - torch.tensor([1.0, 2.0]), start, bounds=(0, 1))
    assert told[0].filename == __file__
    found = least_squares(lambda x: x - torch.tensor([1.0, 2.0]), start, bounds=(0, 1), method="dogbox")
    torch.testing.assert_close(found.x, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_jacobian_does_not_depend_on_the_loss(solver):
    found = least_squares(decay, START, loss="cauchy", tr_solver=solver)
    expected = torch.func.jacrev(decay)(found.x)
    torch.testing.assert_close(found.jac if solver == "exact" else found.jac.to_dense(), expected)


@pytest.mark.parametrize("method", ["trf", "dogbox"])
@pytest.mark.parametrize("loss", ["linear", "huber"])
def test_lsmr_with_one_unknown_matches_scipy(method, loss):
    """SciPy's "trf" with lsmr raises IndexError for some functions of one unknown."""
    start = torch.tensor([3.0], dtype=D)

    def residuals(x):
        return torch.stack([x[0] ** 2 - 2, x[0] - 1])

    found = least_squares(residuals, start, method=method, loss=loss, f_scale=0.3, tr_solver="lsmr")
    expected = so.least_squares(lambda x: [x[0] ** 2 - 2, x[0] - 1], [3.0], loss=loss, f_scale=0.3)
    np.testing.assert_allclose(found.x, expected.x, rtol=1e-5)
    torch.testing.assert_close(found.jac.to_dense(), torch.stack([2 * found.x, torch.ones(1, dtype=D)]))


@pytest.mark.parametrize("loss", ["linear", "soft_l1"])
@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "lm-geodesic"])
def test_keyboard_interrupt_returns_the_last_accepted_point(method, loss):
    if method.startswith("lm") and loss != "linear":
        pytest.skip("these methods have no other loss")
    calls = 0

    def f(p):
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return decay(p)

    found = least_squares(f, START, method=method, loss=loss)
    assert (found.success, found.status) == (False, 99)
    assert "Interrupted" in found.message
    z = decay(found.x).square()
    assert z.sum() < decay(START).square().sum()
    rho, slope = (z, torch.ones_like(z)) if loss == "linear" else (2 * ((1 + z).sqrt() - 1), (1 + z).rsqrt())
    np.testing.assert_allclose(found.cost, rho.sum() / 2)
    np.testing.assert_allclose(found.jac, jacobian(found.x.numpy()), rtol=1e-9)
    np.testing.assert_allclose(found.grad, found.jac.mT @ (slope * found.fun), rtol=1e-9)


def test_interrupt_before_the_first_point_is_raised():
    def f(p):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        least_squares(f, START)
    with pytest.raises(KeyboardInterrupt):
        hodiff.optimize.minimize(f, START)


@pytest.mark.parametrize("method", ["trf", "dogbox"])
def test_evaluations_stay_within_the_bounds(method):
    """As f leaves the graph, its gradient is compared with differences."""
    own_gradient._asked.clear()

    def f(x):
        outside.append(bool((x.detach() < 0).any() or x.detach()[1] > 3))
        return torch.stack([x[0].sqrt() - 1, (3 - x[1]).sqrt() - 1, x.sum()])

    outside = []
    found = least_squares(f, torch.tensor([1e-4, 1e-4], dtype=D), method=method, bounds=([0, 0], [5, 3]))
    assert found.success
    with pytest.raises(hodiff.InputError, match="expected a start within them"):
        least_squares(f, torch.tensor([-1e-4, 1e-4], dtype=D), method=method, bounds=([0, 0], [5, 3]))
    assert not any(outside)
