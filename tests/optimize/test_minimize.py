"""Tests of `minimize` against SciPy with derivatives by hand: equal iterates; and of its own contract."""

import functools
import importlib
import inspect

import numpy as np
import pytest
import scipy
import scipy.optimize as so
import torch
from cases import rosenbrock
from custom_functions import cubed_slope, old_style
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

import hodiff
from hodiff import HodiffWarning
from hodiff.derivatives import own_gradient
from hodiff.optimize import minimize
from hodiff.optimize.methods import METHODS, OPTIONS, _documented

D = torch.float64
START = torch.tensor([-1.2, 1.0, 0.8, 0.5, 2.0], dtype=D)
BY_HAND = {"products": {"hessp": so.rosen_hess_prod}, "hessian": {"hess": so.rosen_hess}, "": {}}


def bowl(x, center=0.0):
    return ((x - center) ** 2).sum() + ((x - center) ** 4).sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.solver is None])
def test_iterates_match_scipy_with_manual_derivatives(method):
    # dogleg requires a positive definite Hessian, so its start has one.
    start = START if method != "dogleg" else torch.full((5,), 1.02, dtype=D)
    ours, theirs = [], []
    found = minimize(rosenbrock, start, method=method, callback=lambda r: ours.append(r.x.numpy().copy()))
    given = {"jac": so.rosen_der, **BY_HAND[METHODS[method].curvature]}
    expected = so.minimize(
        so.rosen, start.numpy(), method=method, callback=lambda x, *_: theirs.append(x.copy()), **given
    )
    # Rounding errors grow at each step, most in conjugate gradients and truncated Newton.
    for k, (one, other) in enumerate(zip(ours[:12], theirs[:12], strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-14 * 10 ** (k / 2) * (1e6 if method in {"cg", "tnc"} else 10))
    assert found.success
    assert found.success == expected.success
    np.testing.assert_allclose(found.fun, expected.fun, rtol=1e-6, atol=1e-12)
    if METHODS[method].curvature == "products":
        assert found.nhvp > 0
        assert found.njev <= found.nfev


def test_points_are_evaluated_once():
    calls = 0

    def f(x):
        nonlocal calls
        calls += 1
        return rosenbrock(x)

    found = minimize(f, START, method="trust-ncg")
    assert calls == found.nfev


BOUNDED = [name for name, method in METHODS.items() if method.bounds]


@pytest.mark.parametrize("method", BOUNDED)
def test_bounded_evaluations_stay_within_the_bounds(method):
    """The start is outside, and as f leaves the graph, its gradient is compared with differences."""
    own_gradient._asked.clear()
    bounds, points = so.Bounds(0.0, [0.9, 2.0, 2.0], keep_feasible=True), []

    def f(x):
        points.append(x.detach().numpy().copy())
        return rosenbrock(x)

    for first in (True, False):
        points.clear()
        found = minimize(f, torch.tensor([1.3, 0.7, -0.8], dtype=D), method=method, bounds=bounds)
        assert all(((bounds.lb <= x) & (x <= bounds.ub)).all() for x in points)
        assert len(points) == found.nfev + 5 * first
    if method == "l-bfgs-b":
        assert found.nfev == len({x.tobytes() for x in points})


def test_constraints_are_evaluated_within_the_bounds():
    positive = {"type": "ineq", "fun": lambda x: x.sqrt() - 0.5}
    found = minimize(bowl, -START[:1], method="slsqp", bounds=(0.25, 2), constraints=positive)
    assert not found.x.isnan().any()
    start = torch.full((2,), -1.0, dtype=D)
    found = minimize(bowl, start, method="slsqp", bounds=(0.1, 2), constraints=positive)
    torch.testing.assert_close(found.x, torch.full((2,), 0.25, dtype=D))


def test_wrong_gradient_within_bounds_warns():
    own_gradient._asked.clear()

    def f(x):
        assert ((x >= 0) & (x <= 1)).all()
        return (x.detach() * x.sin()).sum()

    with pytest.warns(HodiffWarning, match="is not the derivative of the function"):
        minimize(f, torch.tensor([0.0, 0.999, 0.5], dtype=D), method="l-bfgs-b", bounds=(0, 1))


def test_pytrees_dtypes_and_arguments_match():
    x0 = {"a": torch.tensor([1.0, 2.0]), "b": (torch.tensor(3.0, dtype=D),)}
    found = minimize(lambda x, c: bowl(x["a"], c) + bowl(x["b"][0]), x0, torch.tensor(0.5))
    torch.testing.assert_close(found.x["a"], torch.tensor([0.5, 0.5]), atol=1e-4, rtol=0)
    assert found.x["b"][0].dtype is D
    assert abs(found.x["b"][0]) < 1e-5
    assert found.jac["a"].shape == (2,)
    assert isinstance(found.fun, float)
    torch.testing.assert_close(x0["a"], torch.tensor([1.0, 2.0]))


def test_complex_unknowns_match():
    z = torch.tensor([1 + 2j, 0.5 - 1j], dtype=torch.complex128)
    target = torch.tensor([0.3 - 0.2j, 1j], dtype=torch.complex128)
    found = minimize(lambda z: (z - target).abs().square().sum() + (z - target).abs().pow(4).sum(), z)
    torch.testing.assert_close(found.x, target, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.bounds])
@pytest.mark.parametrize("form", ["numbers", "trees", "pairs", "scipy"])
def test_bounds_in_every_form_match(method, form):
    given = {
        "numbers": (1.5, None),
        "trees": (torch.tensor([1.5, 1.5], dtype=D), torch.tensor([3.0, 3.0], dtype=D)),
        "pairs": [(1.5, None), (1.5, 3)],
        "scipy": so.Bounds(1.5, [np.inf, 3.0]),
    }[form]
    found = minimize(
        bowl, torch.tensor([2.0, 2.5], dtype=D), torch.tensor([0.0, 2.0], dtype=D), method=method, bounds=given
    )
    torch.testing.assert_close(found.x, torch.tensor([1.5, 2.0], dtype=D), atol=1e-3, rtol=0)


# newton-cg, slsqp and trust-constr of SciPy return the gradient of another point, or none.
@pytest.mark.parametrize("limit", [0, 3, 5])
@pytest.mark.parametrize("method", METHODS)
def test_jac_is_the_gradient_at_x(method, limit):
    option = {"tnc": "maxfun"}.get(method, "maxiter")
    limit = max(limit, 1) if method in {"trust-constr", "slsqp", "tnc"} else limit
    found = minimize(rosenbrock, START[:3], method=method, options={option: limit})
    np.testing.assert_allclose(found.jac, so.rosen_der(found.x.numpy()), rtol=1e-9)


def test_jac_of_trust_constr_is_not_the_jacobian_of_the_constraints():
    on_circle = so.NonlinearConstraint(lambda x: x @ x, 1, 1)
    found = minimize(rosenbrock, START[:2], method="trust-constr", constraints=on_circle, options={"maxiter": 5})
    np.testing.assert_allclose(found.jac, so.rosen_der(found.x.numpy()), rtol=1e-9)
    np.testing.assert_allclose(found.constr_jac[0], 2 * found.x.numpy()[None], rtol=1e-12)


@pytest.mark.parametrize("maxiter", [0, 1, 2, 3])
def test_interrupted_result_has_the_gradient(maxiter):
    def interrupt(found):
        if len(seen) == maxiter:
            raise KeyboardInterrupt
        seen.append(found)

    for method in ("trust-ncg", "newton-cg", "newton", "ssbroyden"):
        seen = []
        found = minimize(rosenbrock, START, method=method, callback=interrupt)
        assert found.status == 99
        np.testing.assert_allclose(found.jac, so.rosen_der(found.x.numpy()), rtol=1e-9)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.trust_region])
def test_trust_regions_shrink_after_nan(method):
    """The minimum of x - log x is at 1, and full Newton steps from 3 and 8 are negative."""
    found = minimize(lambda x: (x - x.log()).sum(), torch.tensor([0.1, 3.0, 8.0], dtype=D), method=method)
    assert found.success
    assert found.nit < 40
    torch.testing.assert_close(found.x, torch.ones(3, dtype=D), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*the gradient by autograd is not the derivative")
def test_trust_region_that_is_stuck_ends_early():
    start = torch.tensor([1.0, 0.0], dtype=D)
    found = minimize(lambda x: (x - x.detach()).sum(), start, options={"maxiter": 5000})
    assert (found.success, found.status, found.nit) == (False, 2, 100)
    assert "No step changed x in 100 iterations: because of rounding, or a wrong derivative" in found.message
    torch.testing.assert_close(found.jac, torch.ones(2, dtype=D))


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("method", ["trust-ncg", "trust-krylov", "trust-exact", "dogleg"])
def test_non_finite_hessian_ends_early_and_is_named(method):
    """The value and the gradient at the start are finite."""
    f = lambda x: (x[0] - 1).abs().pow(1.5) + (x[1] - 3) ** 2  # noqa: E731
    found = minimize(f, torch.tensor([1.0, 0.0], dtype=D), method=method, options={"maxiter": 5000})
    assert not found.success
    assert found.nit <= 100
    assert "value or derivative is not finite" in found.message


@pytest.mark.parametrize("f", [lambda x: x.abs().sum(), lambda x: ((x - 1) * 3).clamp(min=-6).sum()])
def test_newton_cg_without_curvature_is_no_success(f):
    found = minimize(f, torch.tensor([1.0, 2.0], dtype=D), method="newton-cg")
    assert (found.success, found.status) == (False, 3)
    assert "The last step has length zero" in found.message
    assert f"gradient has norm {found.jac.norm():.1e}" in found.message


def test_non_finite_gradient_is_no_success():
    found = minimize(
        lambda x: (x.sqrt() - 0.5).square().sum(), torch.zeros(2, dtype=D), method="l-bfgs-b", bounds=(0, 1)
    )
    assert not found.success
    assert "The gradient at x is not finite" in found.message


def circle(x):
    return x["p"].square().sum()


@pytest.mark.parametrize("method", ["slsqp", "trust-constr"])
@pytest.mark.parametrize(
    "constraint",
    [{"type": "eq", "fun": lambda x: circle(x) - 1}, so.NonlinearConstraint(circle, 1, 1)],
    ids=["dict", "scipy"],
)
def test_constraints_match_closed_form(method, constraint):
    """The point of the circle nearest to (3, 4) is (0.6, 0.8)."""
    target = torch.tensor([3.0, 4.0], dtype=D)
    x0 = {"p": torch.tensor([1.0, 0.5], dtype=D)}
    found = minimize(lambda x: bowl(x["p"], target), x0, method=method, constraints=constraint)
    torch.testing.assert_close(circle(found.x), torch.ones((), dtype=D), atol=1e-7, rtol=0)
    # bowl is not a distance, so compare with SciPy by hand.
    expected = so.minimize(
        lambda x: ((x - [3, 4]) ** 2).sum() + ((x - [3, 4]) ** 4).sum(),
        [1.0, 0.5],
        constraints=so.NonlinearConstraint(lambda x: x @ x, 1, 1),
        method="slsqp",
        options={"ftol": 1e-12},
    )
    np.testing.assert_allclose(found.x["p"].numpy(), expected.x, atol=1e-4)


@pytest.mark.parametrize("method", ["slsqp", "trust-constr"])
def test_constraints_with_bounds_match_closed_form(method):
    """The point (0.6, 0.8) of the circle is out of bounds, and x = 0.5 is nearest; SciPy lists unequal Jacobians."""
    target = torch.tensor([3.0, 4.0], dtype=D)
    found = minimize(
        lambda x: (x - target).square().sum(),
        torch.tensor([0.3, 0.7], dtype=D),
        method=method,
        bounds=(0, torch.tensor([0.5, 2.0], dtype=D)),
        constraints=so.NonlinearConstraint(lambda x: x @ x, 1, 1),
    )
    torch.testing.assert_close(found.x, torch.tensor([0.5, 0.75**0.5], dtype=D), atol=1e-5, rtol=0)


def test_trust_constr_uses_exact_constraint_hessians():
    """trust-constr takes as few steps as with derivatives by hand."""
    x0 = torch.tensor([0.5, 0.0], dtype=D)
    ours = minimize(rosenbrock, x0, method="trust-constr", constraints=so.NonlinearConstraint(lambda x: x @ x, 0, 1))
    by_hand = so.NonlinearConstraint(
        lambda x: x @ x, 0, 1, jac=lambda x: 2 * x[None], hess=lambda x, v: 2 * v[0] * np.eye(2)
    )
    theirs = so.minimize(
        so.rosen, x0.numpy(), method="trust-constr", jac=so.rosen_der, hessp=so.rosen_hess_prod, constraints=by_hand
    )
    assert ours.nit == theirs.nit
    np.testing.assert_allclose(ours.x.numpy(), theirs.x, rtol=1e-9)


def test_keyboard_interrupt_returns_the_best_point():
    values = []

    def interrupt(found):
        values.append(found.fun)
        if len(values) == 3:
            raise KeyboardInterrupt

    found = minimize(rosenbrock, START, callback=interrupt)
    assert not found.success
    assert "Interrupted" in found.message
    assert found.nit == 3
    assert found.fun == min(values)
    torch.testing.assert_close(rosenbrock(found.x).item(), found.fun)


def test_stop_iteration_stops():
    def stop(found):
        raise StopIteration

    assert minimize(rosenbrock, START, callback=stop).nit <= 1


def test_user_errors_are_raised_unchanged():
    def f(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        minimize(f, START)


def test_non_finite_value_is_no_success():
    found = minimize(lambda x: (x * float("nan")).sum(), torch.ones(2, dtype=D), method="l-bfgs-b")
    assert not found.success
    assert "nan" in found.message


def test_iteration_limit_is_reported():
    found = minimize(rosenbrock, START, options={"maxiter": 2})
    assert not found.success
    assert found.nit == 2
    assert "aximum number of iterations" in found.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "halley"}, "method: expected one of 'bfgs'"),
        (
            {"bounds": (0, 1)},
            "bounds: expected None, because method='trust-ncg' does not support it; pass method='l-bfgs-b'",
        ),
        ({"constraints": {"type": "eq", "fun": circle}}, "constraints: expected None, because method='trust-ncg'"),
        ({"method": "l-bfgs-b", "bounds": [(0, 1)]}, "bounds: expected"),
        ({"method": "l-bfgs-b", "bounds": (2, 1)}, "lower bounds that are at most the upper bounds, got 2 and 1"),
        ({"method": "l-bfgs-b", "bounds": "no"}, "bounds: expected"),
        ({"method": "slsqp", "constraints": circle}, "constraints: expected scipy.optimize.NonlinearConstraint"),
        ({"tol": -1.0}, "tol: expected"),
        ({"callback": 3}, "callback: expected a callable"),
        ({"options": 3}, "options: expected a dict"),
        ({"progress": 1}, "progress: expected True or False"),
        ({"args": (3.0,)}, "args: expected no argument of this name, unlike .* closes over them"),
        ({"jac": True}, "jac: expected no argument of this name, unlike .* exact derivatives"),
        ({"hessp": bowl}, "hessp: expected no argument of this name, unlike .* exact derivatives"),
    ],
)
def test_rejects_bad_arguments(change, words):
    with pytest.raises(hodiff.InputError, match=words):
        minimize(bowl, START, **change)


@pytest.mark.parametrize("f", [lambda x: x, lambda x: x.sum().item(), lambda x: torch.ones(())])
def test_rejects_functions_that_return_no_scalar(f):
    with pytest.raises(hodiff.InputError):
        minimize(f, START)


def test_once_differentiable_functions_work_with_gradient_methods():
    """Gradient methods work if backward is differentiable once, and other methods raise."""

    Cubed = old_style("Cubed", lambda x: (x**3, x), once_differentiable(cubed_slope))

    with pytest.raises(hodiff.RouteError, match="minimize"):
        minimize(lambda x: Cubed.apply(x).square().sum(), torch.ones(2, dtype=D))
    assert minimize(lambda x: Cubed.apply(x).square().sum(), torch.ones(2, dtype=D), method="bfgs").success


def test_gradient_inside_the_loss_is_differentiated():
    """The loss contains torch.autograd.grad, like a physics-informed loss."""
    t = torch.linspace(0, 1, 7, dtype=D)

    def loss(c):
        s = t.clone().requires_grad_()
        u = 1 + c[0] * s + c[1] * s**2
        (slope,) = torch.autograd.grad(u.sum(), s, create_graph=True)
        return (slope + u).square().mean()

    found = minimize(loss, torch.zeros(2, dtype=D))
    matrix = torch.stack([1 + t, 2 * t + t**2], 1)
    expected = torch.linalg.lstsq(matrix, -torch.ones(7, 1, dtype=D)).solution[:, 0]
    torch.testing.assert_close(found.x, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["trust-ncg", "bfgs", "trust-exact"])
def test_argmin_of_minimize_is_differentiable(method):
    """argmin_x of x^4/4 + x^2/2 - p x has the derivative 1 / (3 x^2 + 1)."""
    solver = functools.partial(minimize, method=method, tol=1e-10)
    found = hodiff.implicit.argmin(lambda x, p: (x**4 / 4 + x**2 / 2 - p * x).sum(), solver)
    p = torch.tensor([2.0, 0.3], dtype=D, requires_grad=True)
    x = found(torch.zeros(2, dtype=D), p)
    (slope,) = torch.autograd.grad(x.sum(), p)
    torch.testing.assert_close(slope, 1 / (3 * x**2 + 1).detach(), rtol=1e-6, atol=0)


def test_non_finite_start_is_no_success():
    for method in METHODS:
        start, limit = torch.tensor([float("nan"), 1.0], dtype=D), {"maxiter": 20} if method == "trust-constr" else None
        found = minimize(rosenbrock, start, method=method, options=limit)
        assert not found.success
        assert "nan" in found.message


def test_transforms_raise_and_name_argmin():
    with pytest.raises(hodiff.InputError, match=r"hodiff\.implicit\.argmin"):
        torch.func.grad(lambda a: minimize(lambda x: bowl(x, a), START).x.sum())(torch.zeros(5, dtype=D))
    with pytest.raises(hodiff.InputError, match=r"hodiff\.implicit\.argmin"):
        torch.func.vmap(lambda a: minimize(lambda x: bowl(x, a), START).x)(torch.zeros(2, 5, dtype=D))


@pytest.mark.slow
def test_compiled_code_breaks_the_graph():
    run = torch.compile(lambda x: minimize(bowl, 2 * x).x + 1, backend="eager")
    torch.testing.assert_close(run(START), torch.ones(5, dtype=D), atol=1e-4, rtol=0)


def test_constant_constraint_is_rejected():
    constraint = {"type": "ineq", "fun": lambda x: torch.ones(1)}
    with pytest.raises(hodiff.InputError, match="minimize: constraints: the output does not depend"):
        minimize(bowl, START, method="slsqp", constraints=constraint)


def test_module_that_caches_tensors_matches():
    class Memo(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3, dtype=D))
            self.exponential = None

        def forward(self):
            if self.exponential is None:
                self.exponential = self.w.exp()
            return ((self.exponential - 2) ** 2).sum()

    module = Memo()
    found = minimize(lambda p: torch.func.functional_call(module, p, ()), {"w": torch.zeros(3, dtype=D)}, tol=1e-8)
    assert found.success
    torch.testing.assert_close(found.x["w"], torch.full((3,), 2.0, dtype=D).log(), atol=1e-6, rtol=0)


PAIR = torch.tensor([0.5, 2.5], dtype=D)


def away(p):
    return (p[0] - 5) ** 2 + (p[1] + 5) ** 2


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("x0", [PAIR, list(PAIR)], ids=["a tensor", "a list"])
@pytest.mark.parametrize("bounds", [([0, 1], [2, 3]), ((0.0, 1.0), (2.0, 3.0)), [[0, 1], [2, 3]]])
def test_ambiguous_bounds_are_rejected(batched, x0, bounds):
    x0 = pytree.tree_map(lambda leaf: leaf[None], x0) if batched else x0
    with pytest.raises(
        hodiff.InputError, match=r"Bounds\(\[0.0, 1.0\], \[2.0, 3.0\]\).*\[\(0.0, 1.0\), \(2.0, 3.0\)\]"
    ):
        minimize(away, x0, method="l-bfgs-b", bounds=bounds, batched=batched)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ([(0, 1), (2, 3)], [1, 2]),
        (iter([(0, 1), (2, 3)]), [1, 2]),
        (((0, 1), (2, None)), [1, 2]),
        (so.Bounds([0, 1], [2, 3]), [2, 1]),
        ((torch.tensor([0.0, 1.0], dtype=D), torch.tensor([2.0, 3.0], dtype=D)), [2, 1]),
        ((np.array([0, 1]), [2, 3]), [2, 1]),
        ((None, [2, 3]), [2, -5]),
        (([0, 2], [2, 3]), [2, 2]),  # both meanings agree
    ],
)
def test_bounds_of_two_unknowns_with_one_meaning_match(bounds, expected):
    found = minimize(away, PAIR, method="l-bfgs-b", bounds=bounds).x
    torch.testing.assert_close(found, torch.tensor(expected, dtype=D))


@pytest.mark.parametrize("method", [*METHODS, "batched"])
def test_empty_start_is_rejected(method):
    options = {"batched": True} if method == "batched" else {"method": method}
    with pytest.raises(hodiff.InputError, match="minimize: x0: expected at least one element"):
        minimize(lambda x: x.sum(), torch.zeros(4, 0, dtype=D), **options)


@pytest.mark.parametrize("method", ["tnc", "l-bfgs-b", "newton-krylov"])
def test_callback_stops_the_run(method):
    def stop(result):
        raise StopIteration

    found = minimize(bowl, START, torch.zeros(5, dtype=D), method=method, callback=stop)
    assert not found.success
    assert "StopIteration" in found.message


@pytest.mark.parametrize("method", OPTIONS)
def test_rejects_options_that_scipy_does_not_know(method):
    with pytest.raises(
        hodiff.InputError, match=rf"options: expected options of method='{method}', got 'max_iterations'"
    ):
        minimize(rosenbrock, START, method=method, options={"max_iterations": 1})
    with pytest.raises(hodiff.InputError, match=r"got 'xyz', which it does not have; it takes \w+, "):
        minimize(rosenbrock, START, method=method, options={"xyz": 1})


@pytest.mark.parametrize("method", OPTIONS)
def test_options_match_installed_scipy(method):
    """The options are the parameters of SciPy's function, except those that `minimize` passes itself."""
    name = {"newton-cg": "newtoncg", "l-bfgs-b": "lbfgsb", "trust-constr": "trustregion_constr"}.get(method)
    if method in {"dogleg", "trust-exact", "trust-krylov", "trust-ncg"}:
        from scipy.optimize._trustregion import _minimize_trust_region as function
    else:
        function = getattr(importlib.import_module("scipy.optimize._minimize"), f"_minimize_{name or method}")
    passed = {"args", "jac", "grad", "hess", "hessp", "callback", "bounds", "constraints", "unknown_options"}
    own = {"trust-exact": {"inexact"}, "trust-krylov": {"subproblem_maxiter"}}  # one function serves several methods
    foreign = own.get(method, {"inexact", "subproblem_maxiter"})
    taken = set(list(inspect.signature(function).parameters)[2:]) - passed - foreign - {"subproblem"}
    assert taken <= {*OPTIONS[method], *_documented(method)}
    version = tuple(map(int, scipy.__version__.split(".")[:2]))
    if version >= (1, 17):
        gone = {"disp", "iprint"} if method == "l-bfgs-b" and version >= (1, 18) else set()
        assert set(OPTIONS[method]) - gone <= taken


@pytest.mark.parametrize("method", ["slsqp", "trust-constr"])
@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"type": "ineq", "fun": lambda x: x[:0]}, "expected functions that return numbers, got one that returns None"),
        ({"type": "ineq", "fun": lambda x: (x - 50).log()}, "expected finite values at x0, got nan"),
        (so.LinearConstraint(np.ones((1, 3)), 0, 1), "a column for each number of x0, 5, got 3"),
        (so.NonlinearConstraint(lambda x: x.sum(), [1, 2, 3], [4, 4, 4]), "limits for each value of the function, 1"),
        (so.NonlinearConstraint(lambda x: x, 2, 1), "lower limits that are at most the upper limits, got 2 and 1"),
    ],
)
def test_infeasible_and_undefined_constraints_are_rejected(method, constraint, words):
    with pytest.raises(hodiff.InputError, match=f"minimize: constraints: .*{words}"):
        minimize(bowl, START, method=method, constraints=constraint)


@pytest.mark.parametrize("method", ["l-bfgs-b", "tnc", "slsqp", "trust-constr"])
def test_bounds_that_fix_all_unknowns_return_the_start(method):
    found = minimize(bowl, START, method=method, bounds=(START, START))
    torch.testing.assert_close(found.x, START)
    assert found.success
    assert isinstance(found.status, int)
    assert isinstance(found.nit, int)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "l-bfgs-b", "bounds": (torch.zeros(3), None)}, "minimize: bounds does not match at its only leaf"),
        ({"method": "l-bfgs-b", "bounds": (float("nan"), 1)}, "minimize: bounds: expected numbers, got nan"),
        ({"method": "tnc", "options": {"maxiter": 5}}, "did you mean 'maxfun'"),
    ],
)
def test_errors_name_the_argument(options, words):
    with pytest.raises(hodiff.InputError, match=words):
        minimize(bowl, START, **options)


def test_empty_batch_is_rejected():
    with pytest.raises(hodiff.InputError, match="x0: expected at least one problem"):
        minimize(lambda x: x.square().sum(), torch.zeros(0, 4, dtype=D), batched=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", [None, "newton-cg", "trust-krylov", "trust-constr", "newton-krylov", "l-bfgs-b"])
@pytest.mark.parametrize("unit", [1e20, 1e30])
def test_large_values_in_float32_do_not_overflow(method, unit):
    """Multiplying the Hessian by the unscaled gradient would overflow."""

    def f(x):
        return unit * ((x[0] - 1) ** 2 + 10 * (x[1] - x[0] ** 2) ** 2)

    found = minimize(f, torch.tensor([-1.2, 1.0]), method=method)
    torch.testing.assert_close(found.x, torch.ones(2), rtol=1e-2, atol=1e-2)


def test_message_says_that_the_start_is_the_solution():
    found = minimize(lambda x: 1e-20 * x.square().sum(), torch.ones(2), method="bfgs")
    assert found.success
    assert found.message.startswith("x is x0, where the gradient has norm 2.8e-20.")


def test_slow_functions_warn_with_the_cost_of_an_iteration(monkeypatch):
    monkeypatch.setattr(importlib.import_module("hodiff.optimize.iterations"), "SLOW", 0.0)
    start = torch.zeros(2, dtype=torch.float64)
    with pytest.warns(
        HodiffWarning, match=r"1 iterations of 'trust-ncg' took .* products with the Hessian.*'l-bfgs-b'"
    ) as told:
        minimize(rosenbrock, start)
    assert len(told) == 1
    with pytest.warns(HodiffWarning, match=r"iterations of 'l-bfgs-b' took .* s an iteration. progress=True"):
        minimize(rosenbrock, start, method="l-bfgs-b")


@pytest.mark.parametrize(("n", "upper", "start"), [(3, 0.5, 0.0), (3, 0.7, 0.2), (6, 0.6, -0.5)])
def test_l_bfgs_b_goes_on_where_scipy_stops_at_a_large_projected_gradient(n, upper, start):
    def rosenbrock(x):
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    x0 = torch.full((n,), start, dtype=torch.float64)
    found = minimize(rosenbrock, x0, method="l-bfgs-b", bounds=(None, upper))
    expected = minimize(rosenbrock, x0, method="slsqp", bounds=(None, upper), tol=1e-12)
    assert found.success
    torch.testing.assert_close(found.x, expected.x, atol=1e-4, rtol=1e-4)
    assert found.nfev >= found.nit
