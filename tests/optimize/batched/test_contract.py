"""Tests of `minimize` and `least_squares` with `batched=True`: every problem is solved as if it were alone."""

import math

import numpy as np
import pytest
import scipy.optimize as so
import torch
from torch.func import vmap

import hodiff
from hodiff.optimize import least_squares, minimize
from hodiff.optimize.batched.batched_methods import METHODS

D = torch.float64
BOUNDED = [name for name, method in METHODS.items() if method.bounds]


def rosenbrock(x, a=1.0):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (a - x[:-1]) ** 2).sum()


def starts(count, n=3, seed=0):
    return torch.randn(count, n, dtype=D, generator=torch.Generator().manual_seed(seed))


def shifted(x, center, weight):
    """Compute a function with minimum 1 at the center, ill-conditioned by the weights."""
    return 1 + (weight * (x - center) ** 2).sum() + ((x - center) ** 4).sum()


def decay(p, t, data):
    return p["height"] * torch.exp(-p["rate"] * t) - data


@pytest.mark.parametrize("method", METHODS)
def test_batched_problem_matches_the_single_problem(method):
    """Steps and counts equal those of a single problem, with one non-finite start and some problems that end early."""
    x0 = starts(4)
    x0[1, 1] = math.nan
    x0[2] = 1.0
    together = minimize(rosenbrock, x0, method=method, batched=True)
    for b in range(4):
        alone = minimize(rosenbrock, x0[b : b + 1], method=method, batched=True)
        for name in ("x", "fun", "jac"):
            torch.testing.assert_close(together[name][b], alone[name][0], rtol=1e-9, atol=1e-9, equal_nan=True)
        assert [together[name][b] for name in ("nit", "nfev", "status")] == [
            alone[name][0] for name in ("nit", "nfev", "status")
        ]
    assert together.success.tolist() == [True, False, True, True]
    assert "not finite" in together.message[1]
    assert together.nit[2] == 0
    assert together.nfev[2] == 1
    assert together.nfev.unique().numel() == 3


@pytest.mark.parametrize("method", METHODS)
def test_solutions_match_a_loop(method):
    """Solutions with shared and per-problem arguments match a loop; values and gradients match formulas."""
    a = torch.linspace(0.5, 2, 3, dtype=D)
    x0 = starts(3, seed=1).abs()
    options = {"gtol": 1e-8} | ({"ftol": 1e-15} if method == "l-bfgs-b" else {})
    found = minimize(rosenbrock, x0, a, method=method, options=options, batched=True)
    assert found.success.all()
    assert found.fun.shape == found.nit.shape == (3,)
    for b in range(3):
        one = minimize(rosenbrock, x0[b], a[b], method=method, options=options)
        torch.testing.assert_close(found.x[b], one.x, rtol=1e-6, atol=1e-6)
        x = found.x[b].numpy()
        value = sum(100 * (x[i + 1] - x[i] ** 2) ** 2 + (a[b].item() - x[i]) ** 2 for i in range(2))
        assert found.fun[b].item() == pytest.approx(value, rel=1e-12, abs=1e-25)
        slopes = [
            sum(-400 * x[j] * (x[j + 1] - x[j] ** 2) - 2 * (a[b].item() - x[j]) for j in [i] if j < 2)
            + sum(200 * (x[j] - x[j - 1] ** 2) for j in [i] if j)
            for i in range(3)
        ]
        np.testing.assert_allclose(found.jac[b], slopes, atol=1e-12)


def test_hessian_of_the_result_matches_scipy():
    x0 = starts(4)
    found = minimize(rosenbrock, x0, options={"maxiter": 0}, batched=True)
    np.testing.assert_allclose(found.hess, np.stack([so.rosen_hess(x) for x in x0.numpy()]), rtol=1e-12)


def test_bfgs_inverse_of_a_quadratic_is_exact_after_n_steps():
    """After n steps, BFGS has the inverse Hessians of several problems up to the accuracy of the line search."""
    matrices = starts(3, 16).reshape(3, 4, 4)
    matrices = matrices @ matrices.mT + torch.eye(4, dtype=D)
    found = minimize(lambda x, m: x @ m @ x / 2, starts(3, 4), matrices, method="bfgs", batched=True, tol=1e-12)
    torch.testing.assert_close(found.hess_inv, matrices.inverse(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_pytrees_dtypes_and_in_dims_match(method):
    x0 = {"a": torch.ones(3, 2), "b": (torch.full((3,), 2.0, dtype=D),)}
    center = torch.tensor([[0.5, 1.0, -1.0], [0.25, 2.0, 0.0]])

    def f(x, center, scale, power):
        return scale["s"] * ((x["a"] - center) ** power).sum() + ((x["b"][0] - center[0]) ** power).sum()

    found = minimize(f, x0, center, {"s": torch.tensor(2.0)}, 2, in_dims=(1, None, None), method=method, batched=True)
    assert found.success.all()
    torch.testing.assert_close(found.x["a"], center.T, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.x["b"][0], center[0].to(D), atol=1e-4, rtol=0)
    assert found.fun.dtype is D
    assert found.jac["a"].shape == (3, 2)
    assert x0["a"].eq(1).all()


def test_complex_unknowns_match():
    target = torch.tensor([[0.3 - 0.2j, 1j], [2.0, -1 + 1j]], dtype=torch.complex128)
    found = minimize(lambda z, t: (z - t).abs().square().sum(), torch.zeros_like(target), target, batched=True)
    torch.testing.assert_close(found.x, target, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", BOUNDED)
@pytest.mark.parametrize("form", ["numbers", "tree", "rows", "pairs", "scipy", "mixed"])
def test_bounds_in_every_form_match_the_nearest_point(method, form):
    """The minimum of a separable function in a box is the nearest point of the box."""
    center, rows = torch.tensor([[0.0, 2.0], [4.0, 2.5]], dtype=D), torch.tensor([[1.5, 1.0], [2.0, 2.75]], dtype=D)
    given, lower, upper = {
        "numbers": ((1.5, 3), 1.5, 3.0),
        "tree": ((torch.tensor([1.5, 2.25], dtype=D), None), torch.tensor([1.5, 2.25], dtype=D), math.inf),
        "rows": ((rows, rows + 1), rows, rows + 1),
        "pairs": ([(1.5, None), (None, 2.25)], torch.tensor([1.5, -math.inf]), torch.tensor([math.inf, 2.25])),
        "scipy": (so.Bounds(1.5, [np.inf, 2.25]), 1.5, torch.tensor([math.inf, 2.25])),
        "mixed": ((1.75, rows + 1), 1.75, rows + 1),
    }[form]
    x0 = torch.tensor([[2.0, 1.5], [9.0, -9.0]], dtype=D)
    weight = torch.tensor([1.0, 30.0], dtype=D)
    found = minimize(shifted, x0, center, weight, in_dims=(0, None), method=method, bounds=given, batched=True)
    expected = torch.as_tensor(center).clamp(torch.as_tensor(lower, dtype=D), torch.as_tensor(upper, dtype=D))
    assert found.success.all()
    torch.testing.assert_close(found.x, expected, atol=2e-4, rtol=0)


def test_bounds_that_activate_and_deactivate_match_scipy():
    """Bounds that become active and inactive again match SciPy with a gradient by hand, with a box per problem."""
    x0, lower = starts(8, 6, seed=2), starts(8, 6, seed=3) - 1
    upper = lower + starts(8, 6, seed=4).abs() * 2
    found = minimize(rosenbrock, x0, bounds=(lower, upper), batched=True, options={"ftol": 1e-15, "gtol": 1e-9})
    for b in range(8):
        box = so.Bounds(lower[b].numpy(), upper[b].numpy())
        tight = {"ftol": 1e-16, "gtol": 1e-9}
        there = so.minimize(so.rosen, x0[b].numpy(), jac=so.rosen_der, bounds=box, method="l-bfgs-b", options=tight)
        ours = so.minimize(so.rosen, found.x[b].numpy(), jac=so.rosen_der, bounds=box, method="l-bfgs-b", options=tight)
        # SciPy may find another minimum, but cannot improve this one.
        assert found.fun[b].item() <= ours.fun + 1e-9 * abs(ours.fun)
        assert found.fun[b].item() == pytest.approx(there.fun, rel=1e-7)
    assert ((found.x >= lower) & (found.x <= upper)).all()
    assert ((found.x == lower) | (found.x == upper)).any()


def test_least_squares_match_scipy():
    """Fits of decays within bounds match SciPy with Jacobians in NumPy."""
    t = torch.linspace(0, 3, 20, dtype=D)
    rate = torch.linspace(0.3, 3, 7, dtype=D)
    noise = 0.05 * starts(7, 20, seed=5)
    data = 2.5 * torch.exp(-rate[:, None] * t) + noise
    x0 = {"height": torch.ones(7, dtype=D), "rate": torch.ones(7, dtype=D)}
    bounds = ({"height": torch.zeros((), dtype=D), "rate": torch.full((), 0.5, dtype=D)}, 2.4)
    found = least_squares(decay, x0, t, data, in_dims=(None, 0), bounds=bounds, batched=True)
    assert found.success.all()
    assert found.jac.shape == (7, 20, 2)
    times = t.numpy()
    for b in range(7):
        theirs = so.least_squares(
            lambda p, b=b: p[0] * np.exp(-p[1] * times) - data[b].numpy(),
            [1.0, 1.0],
            lambda p: np.stack([np.exp(-p[1] * times), -times * p[0] * np.exp(-p[1] * times)], 1),
            bounds=([0, 0.5], [2.4, 2.4]),
            method="dogbox",
            xtol=1e-14,
            ftol=1e-14,
        )
        assert found.cost[b].item() <= theirs.cost * (1 + 1e-10)
        assert found.cost[b].item() == pytest.approx(theirs.cost, rel=1e-7)
        np.testing.assert_allclose([found.x["height"][b], found.x["rate"][b]], theirs.x, rtol=1e-4)
        np.testing.assert_allclose(found.jac[b], theirs.jac, rtol=1e-3, atol=1e-4)
        assert [found.active_mask[name][b] for name in ("height", "rate")] == list(theirs.active_mask)
    free = torch.stack([found.active_mask["height"], found.active_mask["rate"]], 1) == 0
    slopes = torch.stack([found.grad["height"], found.grad["rate"]], 1)
    assert (slopes[free].abs() < 1e-5).all()
    assert found.active_mask["rate"][0] == -1


def test_least_squares_converge_where_gauss_newton_diverges():
    """Gauss-Newton steps grow for the arc tangent beyond 1.39; damping shortens them."""
    x0 = torch.tensor([[3.0], [-10.0], [1.0]], dtype=D)
    found = least_squares(torch.atan, x0, batched=True)
    assert found.success.all()
    torch.testing.assert_close(found.x, torch.zeros(3, 1, dtype=D), atol=1e-6, rtol=0)
    assert found.nfev[0] > found.njev[0]


def test_nan_residuals_fail_only_their_own_problem():
    x0 = torch.tensor([[0.5], [math.nan], [3.0]], dtype=D)
    found = least_squares(lambda x: torch.cat([x.log(), x - 1]), x0, batched=True)
    assert found.success.tolist() == [True, False, True]
    torch.testing.assert_close(found.x[[0, 2]], torch.ones(2, 1, dtype=D), atol=1e-6, rtol=0)
    assert found.status[1] == -1


def test_float32_ends_at_its_precision():
    x0 = starts(3).float()
    for method in METHODS:
        found = minimize(rosenbrock, x0, method=method, batched=True, tol=1e-3)
        assert found.x.dtype is torch.float32
        assert (found.fun < 1e-6).all() or found.success.all()
        # A tolerance beyond float32 accuracy ends the search with a message.
        beyond = minimize(rosenbrock, x0, method=method, batched=True, options={"gtol": 0.0, "maxiter": 300})
        assert (beyond.nit < 200).all()
        torch.testing.assert_close(beyond.x, torch.ones(3, 3), atol=2e-2, rtol=0)


def test_tol_sets_the_tolerances_of_scipy():
    """`tol` sets both tolerances of "l-bfgs-b"; otherwise the change of the value would end the search at 2e-9."""
    given = {"method": "l-bfgs-b", "batched": True}
    by_tol = minimize(rosenbrock, starts(3), tol=1e-14, **given)
    by_name = minimize(rosenbrock, starts(3), options={"gtol": 1e-14, "ftol": 1e-14}, **given)
    assert by_tol.nfev.tolist() == by_name.nfev.tolist()
    assert (by_tol.nfev > minimize(rosenbrock, starts(3), options={"gtol": 1e-14}, **given).nfev).any()


def test_iteration_limit_is_reported():
    found = minimize(rosenbrock, starts(3), options={"maxiter": 2}, batched=True)
    assert found.status.tolist() == [1, 1, 1]
    assert found.nit.tolist() == [2, 2, 2]
    assert "aximum number" in found.message[0]


def test_keyboard_interrupt_returns_the_best_points():
    calls = 0

    def f(x):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return rosenbrock(x)

    found = minimize(f, starts(3), batched=True)
    assert found.status.tolist() == [99] * 3
    torch.testing.assert_close(vmap(rosenbrock)(found.x), found.fun)
    assert (found.fun < vmap(rosenbrock)(starts(3))).all()
    assert not found.success.any()


def test_interrupted_least_squares_are_no_success():
    def f(x):
        calls.append(0)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    calls = []
    found = least_squares(f, starts(3, 2), batched=True)
    assert found.status.tolist() == [99] * 3
    assert not found.success.any()


def test_argmin_of_minimize_is_differentiable():
    """argmin_x of x^4/4 + x^2/2 - p x has the derivative 1 / (3 x^2 + 1)."""

    def f(x, p):
        return (x**4 / 4 + x**2 / 2 - p * x).sum()

    found = hodiff.implicit.argmin(
        lambda x, p: vmap(f)(x, p).sum(), lambda _, x, p: minimize(f, x, p, batched=True, tol=1e-10)
    )
    p = torch.tensor([[2.0, 0.3], [-1.0, 5.0]], dtype=D, requires_grad=True)
    x = found(torch.zeros(2, 2, dtype=D), p)
    (slope,) = torch.autograd.grad(x.sum(), p)
    torch.testing.assert_close(slope, 1 / (3 * x**2 + 1).detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x0": torch.ones(())}, "x0: expected leaves with the problems along their first dimension"),
        ({"x0": {"a": torch.ones(2, 3), "b": torch.ones(3)}}, "x0: expected leaves with the problems"),
        ({"x0": torch.ones(0, 2)}, "x0: expected at least one problem along the first dimension, got 0"),
        ({"args": (torch.ones(3),)}, r"args\[0\]: expected 2 in dimension 0.*pass in_dims with None"),
        ({"args": (torch.ones(2),), "in_dims": (0, None)}, "in_dims: expected an int or None, or a tuple"),
        ({"method": "cg"}, "method: expected one of 'bfgs'"),
        ({"method": "bfgs", "bounds": (0, 1)}, "bounds: expected None.*pass method='l-bfgs-b'"),
        ({"bounds": (torch.ones(2, 3), 0)}, "lower bounds that are at most"),
        ({"bounds": (torch.ones(5), None)}, "does not match"),
        ({"constraints": {"type": "eq", "fun": rosenbrock}}, "constraints: expected None.*one by one"),
        ({"callback": print}, "callback: expected None with batched=True"),
        ({"options": {"gtoll": 1}}, "did you mean 'gtol'"),
        ({"batched": 1}, "batched: expected True or False"),
    ],
)
def test_rejects_bad_arguments(change, words):
    given = {"x0": torch.ones(2, 3), "args": (), "batched": True} | change
    with pytest.raises(hodiff.InputError, match=words):
        minimize(lambda x, *_: rosenbrock(x), given.pop("x0"), *given.pop("args"), **given)


@pytest.mark.parametrize("f", [lambda x: x, lambda x: torch.ones(()), lambda x: x.sum().to(torch.int64)])
def test_rejects_functions_that_return_no_scalar(f):
    with pytest.raises(hodiff.InputError, match="minimize"):
        minimize(f, torch.ones(2, 3), batched=True)


def test_rejects_in_dims_without_batched():
    with pytest.raises(hodiff.InputError, match="in_dims: expected 0 without batched=True"):
        minimize(rosenbrock, torch.ones(3), in_dims=None)


def test_rejects_methods_of_single_problems():
    with pytest.raises(hodiff.InputError, match="batched: expected method='lm'"):
        least_squares(lambda x: x, torch.ones(2, 3), method="trf", batched=True)
