"""Tests of NumPy code as a function: finite differences, their error estimate, rules, and errors for missing terms."""

import re

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import torch

import hodiff
from hodiff.errors import HodiffWarning, InputError, RouteError
from hodiff.functions.numpy.numpy_function import numpy_function

D = torch.float64
SMOOTH = {
    "sin": (np.sin, torch.sin),
    "log": (np.log, torch.log),
    "erf": (scipy.special.erf, torch.special.erf),
    "quintic": (lambda x: x**5, lambda x: x**5),
    "narrow": (lambda x: np.exp(-50 * x**2), lambda x: torch.exp(-50 * x**2)),
}
POINTS = torch.tensor([1e-3, 0.2, 1.3, 7.0, 150.0], dtype=D)


def nested(f, order):
    for _ in range(order):
        f = (lambda g: lambda x: torch.func.grad(lambda x: g(x).sum())(x))(f)
    return f


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.filterwarnings("ignore::hodiff.errors.HodiffWarning")
def test_error_of_differences_is_within_the_estimate(name, elementwise, order):
    code, truth = SMOOTH[name]
    for point in POINTS:
        x = point.reshape(1)
        f = numpy_function(code, elementwise=elementwise, difference_order=2)
        error = float((nested(f, order)(x) - nested(truth, order)(x)).abs())
        assert f.approximate
        assert f.last_error < np.inf
        assert error <= 10 * f.last_error + 1e-300
        assert f.derivative_error(x, order=order) == f.last_error


def test_differences_are_accurate():
    f = numpy_function(np.sin)
    x = torch.linspace(-2, 2, 5, dtype=D)
    assert f.derivative_error(x) < 1e-11
    torch.testing.assert_close(torch.func.jacrev(f)(x), torch.diag(x.cos()), rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.func.jacfwd(f)(x), torch.diag(x.cos()), rtol=0, atol=1e-11)


def test_large_error_estimate_warns():
    coarse = numpy_function(lambda x: np.round(np.sin(3 * x), 2))
    x = torch.tensor(0.2345, dtype=D)
    with pytest.warns(HodiffWarning, match=r"has an error of"):
        slope = torch.func.grad(coarse)(x)
    assert abs(float(slope - 3 * (3 * x).cos())) < 10 * coarse.last_error


@pytest.mark.slow
def test_several_inputs_outputs_and_constants():
    def f(x, n, y, scale=1.0):
        return scale * np.outer(x, y), x.sum() ** n, np.arange(n)

    wrapped = numpy_function(f)
    x, y = torch.tensor([0.3, 0.8], dtype=D), torch.tensor([1.0, 2.0, 3.0], dtype=D)
    outer, _power, integers = wrapped(x, 3, y, scale=2.0)
    torch.testing.assert_close(outer, 2 * torch.outer(x, y))
    assert integers.dtype == torch.int64
    hodiff.assert_differentiable(lambda x, y: wrapped(x, 3, y, scale=2.0), (x, y), order=1, scipy=False)


@pytest.mark.slow
def test_derivatives_of_an_ode_solution_match_runge_kutta():
    """Derivatives of a Lotka-Volterra solution by its parameters match Runge-Kutta steps in torch."""

    def flow(parameters):
        a, b = parameters

        def rates(t, z):
            return [a * z[0] - z[0] * z[1], z[0] * z[1] - b * z[1]]

        return scipy.integrate.solve_ivp(rates, (0, 1), [1.0, 0.5], rtol=1e-11, atol=1e-12).y[:, -1]

    def by_steps(parameters, steps=400):
        a, b = parameters

        def rates(z):
            return torch.stack([a * z[0] - z[0] * z[1], z[0] * z[1] - b * z[1]])

        z, h = torch.tensor([1.0, 0.5], dtype=D), 1 / steps
        for _ in range(steps):
            k1 = rates(z)
            k2 = rates(z + h / 2 * k1)
            k3 = rates(z + h / 2 * k2)
            z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + rates(z + h * k3))
        return z

    parameters = torch.tensor([1.1, 0.7], dtype=D)
    wrapped = numpy_function(flow)
    gap = (torch.func.jacrev(wrapped)(parameters) - torch.func.jacrev(by_steps)(parameters)).abs().max()
    assert wrapped.last_error < 1e-6
    assert float(gap) < 10 * wrapped.last_error + 1e-8


def test_missing_rule_of_higher_order_raises():
    x = torch.tensor([0.5], dtype=D)
    once = numpy_function(np.sin)
    with pytest.raises(RouteError, match=r"sin: this order of derivative has no rule.*difference_order=2"):
        nested(once, 2)(x)
    exact = numpy_function(np.sin, elementwise=True, derivatives=[np.cos])
    nested(exact, 1)(x)
    with pytest.raises(RouteError, match=r"sin: this order of derivative has no rule"):
        nested(exact, 2)(x)
    by_vjp = numpy_function(np.sin, vjp=lambda u, x: u * np.cos(x))
    torch.testing.assert_close(nested(by_vjp, 1)(x), x.cos())
    for route in hodiff.ROUTES:
        with pytest.raises(RouteError, match=r"no rule|the vjp of sin"):
            hodiff.hvp(lambda x: by_vjp(x).sum(), x, x, route=route)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(by_vjp(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RouteError, match="the vjp of sin"):
        torch.autograd.grad(slope.sum(), leaf)


def test_rule_may_have_its_own_rule():
    """A vjp in NumPy code can have its own vjp in NumPy code."""

    def second(w, u, x):
        return (w * np.cos(x), -w * u * np.sin(x))

    first = numpy_function(lambda u, x: u * np.cos(x), vjp=second)
    f = numpy_function(np.sin, vjp=first)
    x = torch.tensor([0.5, 1.5], dtype=D)
    assert not f.approximate
    torch.testing.assert_close(torch.func.hessian(lambda x: f(x).sum())(x), torch.diag(-x.sin()))
    with pytest.raises(RouteError):
        nested(f, 3)(x)


def test_rule_by_differences_is_marked_approximate():
    f = numpy_function(np.sin, vjp=numpy_function(lambda u, x: u * np.cos(x)))
    x = torch.tensor([0.5, 1.5], dtype=D)
    assert f.approximate
    torch.testing.assert_close(nested(f, 2)(x), -x.sin(), rtol=0, atol=1e-11)
    assert 0 < f.last_error < 1e-10
    assert f.derivative_error(x) == 0
    with pytest.raises(InputError, match="for higher orders, call"):
        f.derivative_error(x, order=2)


def test_missing_vjp_or_jvp_is_derived_from_the_other():
    A = np.array([[1.0, 2.0, 0.5], [0.3, -1.0, 2.0]])
    T = torch.tensor(A)
    x = torch.tensor([0.2, 0.4, 0.9], dtype=D)

    def code(x):
        return np.sin(A @ x)

    expected = torch.func.jacrev(lambda x: torch.sin(T @ x))(x)
    for rule in (
        {"vjp": lambda u, x: (u * np.cos(A @ x)) @ A},
        {"jvp": lambda t, x: np.cos(A @ x) * (A @ t)},
    ):
        f = numpy_function(code, **rule)
        torch.testing.assert_close(torch.func.jacrev(f)(x), expected)
        torch.testing.assert_close(torch.func.jacfwd(f)(x), expected)
        assert f.derivative_error(x) == 0


def test_none_counts_as_zero_gradient():
    f = numpy_function(lambda x, y: 2 * x + 0 * y, vjp=lambda u, x, y: (2 * u, None))
    x, y = torch.randn(2, 3, dtype=D, requires_grad=True), torch.randn(2, 3, dtype=D, requires_grad=True)
    gradients = torch.autograd.grad(f(x, y).sum(), [x, y], allow_unused=True)
    torch.testing.assert_close(gradients[0], torch.full_like(x, 2))
    torch.testing.assert_close(gradients[1], torch.zeros_like(y))


def test_vmap_loops_over_the_batch():
    f = numpy_function(np.linalg.norm)
    x = torch.randn(4, 3, dtype=D)
    torch.testing.assert_close(torch.func.vmap(f)(x), x.norm(dim=1))
    gradient = torch.func.vmap(torch.func.grad(f))(x)
    torch.testing.assert_close(gradient, x / x.norm(dim=1, keepdim=True), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_receives_float64_and_the_dtype_is_restored(dtype):
    seen = []

    def f(x, k):
        seen.append((x.dtype, k.dtype))
        return x * k

    x = torch.ones(2, dtype=dtype, requires_grad=True)
    y = numpy_function(f)(x, torch.tensor([1, 2]))
    assert y.dtype == dtype
    assert seen[0] == (np.float64, np.int64)
    assert torch.autograd.grad(y.sum(), x)[0].dtype == dtype


def test_code_cannot_change_its_inputs():
    def f(x):
        x *= 2
        return x

    x = torch.ones(2, dtype=D)
    torch.testing.assert_close(numpy_function(f)(x), 2 * torch.ones(2, dtype=D))
    assert torch.equal(x, torch.ones(2, dtype=D))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_breaks_the_graph_and_is_right():
    """The function breaks the graph, and its gradient is correct."""
    f = numpy_function(np.sin)
    compiled = torch.compile(lambda x: f(2 * x).sum(), backend="aot_eager")
    x = torch.randn(3, dtype=D, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(gradient, 2 * (2 * x).cos())


def test_rejects_bad_arguments():
    x = torch.ones(2)
    with pytest.raises(InputError, match=r"numpy_function: f: expected a callable, got int"):
        numpy_function(3)
    with pytest.raises(InputError, match=r"numpy_function: rules: expected one of 'numpy', 'torch', got 'jax'"):
        numpy_function(np.sin, vjp=np.sin, rules="jax")
    with pytest.raises(InputError, match=r"derivatives: expected elementwise=True"):
        numpy_function(np.sin, derivatives=[np.cos])
    with pytest.raises(InputError, match=r"difference_order: expected None with a vjp or jvp"):
        numpy_function(np.sin, vjp=np.cos, difference_order=1)
    with pytest.raises(InputError, match=r"expected neither with elementwise=True"):
        numpy_function(np.sin, vjp=np.cos, elementwise=True)
    with pytest.raises(InputError, match=r"difference_order: expected an int of 0 or more, got -1"):
        numpy_function(np.sin, difference_order=-1)
    with pytest.raises(InputError, match=r"expected an output of shape \(2,\) from an elementwise"):
        numpy_function(np.sum, elementwise=True)(x)
    with pytest.raises(InputError, match=r"expected one floating-point tensor"):
        numpy_function(np.add, elementwise=True)(x, x)
    with pytest.raises(InputError, match=r"expected real tensors, got torch.complex64"):
        numpy_function(np.sin)(x.to(torch.complex64))
    with pytest.raises(InputError, match=r"expected the vjp or jvp to return shapes \[\(2,\)\], got \[\(3,\)\]"):
        torch.func.grad(lambda x: numpy_function(np.sum, vjp=lambda u, x: np.ones(3))(x))(x)


def test_check_notes_the_error_of_differences():
    by_differences = hodiff.assert_differentiable(
        numpy_function(scipy.special.j0), torch.ones(2, dtype=D), order=1, scipy=False
    )
    (note,) = by_differences.notes
    assert re.search(
        r"note: derivatives of order 1 come from differences, .* error of \d\.\de-1\d$", str(by_differences)
    )
    assert note in str(by_differences)
    bessel = numpy_function(scipy.special.j0, elementwise=True, derivatives=[lambda x: -scipy.special.j1(x)])
    assert not hodiff.check(bessel, torch.ones(2, dtype=D), order=1, scipy=False).notes
