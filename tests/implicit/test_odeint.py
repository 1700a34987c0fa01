"""Solutions of differential equations and their derivatives, against closed forms and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import torch
from threads import in_threads

import hodiff
from hodiff import odeint
from hodiff.implicit.runge_kutta import METHODS

D = torch.float64
MEMORIES = ("steps", "checkpoints", "adjoint")
TIGHT = {"method": "dop853", "rtol": 1e-9, "atol": 1e-11}
TIMES = torch.tensor([0.0, 0.4, 1.0], dtype=D)


def numbers(*values):
    return torch.tensor(values, dtype=D)


@pytest.fixture(params=MEMORIES)
def memory(request):
    return request.param


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("times", [[0.0, 0.3, 1.0], [1.0, 0.2, -0.5]])
def test_linear_system_is_the_matrix_exponential(method, times):
    A = numbers([0.2, -1.0, 0.3], [1.0, -0.3, 0.0], [0.5, 0.1, -0.7])
    y0, t = numbers(1.0, -0.5, 0.3), torch.tensor(times, dtype=D)
    found = odeint(lambda t, y: A @ y, y0, t, method=method, rtol=1e-8, atol=1e-10)
    exact = torch.linalg.matrix_exp((t - t[0])[:, None, None] * A) @ y0
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)


def test_pendulum_is_an_elliptic_function():
    # With energy below the separatrix, sin(θ/2) = k sn(t + K, k²) from rest at the amplitude 2 arcsin k.
    k = 0.6
    t = torch.linspace(0, 10, 21, dtype=D)
    start = numbers(2 * math.asin(k), 0.0)
    found = odeint(lambda t, y: torch.stack([y[1], -y[0].sin()]), start, t, method="dop853", rtol=1e-10, atol=1e-12)
    sn, *_ = scipy.special.ellipj(t.numpy() + scipy.special.ellipk(k * k), k * k)
    np.testing.assert_allclose(np.sin(found[:, 0].numpy() / 2), k * sn, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_error_decreases_with_the_order_of_the_method(method):
    order = {"dopri5": 5, "dop853": 8, "bosh3": 3}[method]

    def error(h):
        y = odeint(lambda t, y: y * t.cos(), numbers(1.0), numbers(0.0, 2.0), method=method, step_size=h)
        return float((y[-1] - math.exp(math.sin(2))).abs())

    assert math.log2(error(0.5) / error(0.25)) > order - 0.7


@pytest.mark.parametrize("method", ["dopri5", "dop853"])
def test_steps_that_are_too_long_are_rejected(method):
    """A pulse that begins after a quiet start, where steps have become long."""

    def pulse(t, y):
        return torch.exp(-((t - 3) ** 2) / 0.02) * torch.ones_like(y)

    found = odeint(pulse, numbers(0.0), numbers(0.0, 2.0, 6.0), method=method, rtol=1e-8, atol=1e-9)[-1]
    assert float(found) == pytest.approx(math.sqrt(0.02 * math.pi), abs=1e-7)


def logistic(z, memory):
    """Logistic growth with the capacity 1, as a function of start, rate and the times."""
    return odeint(lambda t, y, rate: rate * y * (1 - y), z[0], z[2:], z[1], memory=memory, **TIGHT)


def logistic_solution(z):
    return z[0] / (z[0] + (1 - z[0]) * torch.exp(-z[1] * (z[2:] - z[2])))


@pytest.mark.parametrize("memory", ["steps", "checkpoints", pytest.param("adjoint", marks=pytest.mark.slow)])
def test_all_derivatives_match_the_logistic_function_to_third_order(memory):
    z, w, v = numbers(0.3, 1.7, 0.2, 0.5, 1.1), numbers(0.7, 1.0, -2.0), numbers(0.5, -1.0, 0.3, 0.2, 1.0)

    def derivatives(f):
        x = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((w * f(x)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient @ v, x, create_graph=True)
        (third,) = torch.autograd.grad(second @ v, x)
        return gradient.detach(), second.detach(), third

    found = derivatives(lambda z: logistic(z, memory))
    torch.testing.assert_close(found, derivatives(logistic_solution), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_every_route_matches_the_logistic_function(memory, route):
    z, v = numbers(0.3, 1.7, 0.2, 0.5), numbers(1.0, -0.5, 0.3, 2.0)
    found = hodiff.hvp(lambda z: logistic(z, memory).sin().sum(), z, v, route=route)
    exact = hodiff.hvp(lambda z: logistic_solution(z).sin().sum(), z, v)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def driven(t, y, p):
    return torch.stack([y[1], p[0] * (1 - y[0] ** 2) * y[1] - y[0] + p[1] * t.cos()])


def variational_equations(y0, p, end):
    """State, first and second derivatives by (y0, p) at the end, by SciPy on the variational equations."""

    def rates(t, state):
        y, S, T = state[:2], state[2:10].reshape(2, 4), state[10:].reshape(2, 4, 4)
        slope = [y[1], p[0] * (1 - y[0] ** 2) * y[1] - y[0] + p[1] * math.cos(t)]
        # First and second derivatives of the second slope by z = (y, p).
        one = np.array([-2 * p[0] * y[0] * y[1] - 1, p[0] * (1 - y[0] ** 2), (1 - y[0] ** 2) * y[1], math.cos(t)])
        two = np.zeros((4, 4))
        two[0, 0] = -2 * p[0] * y[1]
        two[0, 1] = two[1, 0] = -2 * p[0] * y[0]
        two[0, 2] = two[2, 0] = -2 * y[0] * y[1]
        two[1, 2] = two[2, 1] = 1 - y[0] ** 2
        Z = np.vstack([S, [[0, 0, 1, 0], [0, 0, 0, 1]]])
        first = np.stack([S[1], one @ Z])
        second = np.stack([T[1], np.einsum("i,ijk->jk", one[:2], T) + Z.T @ two @ Z])
        return np.concatenate([slope, first.ravel(), second.ravel()])

    start = np.concatenate([y0, np.eye(2, 4).ravel(), np.zeros(32)])
    found = scipy.integrate.solve_ivp(rates, (0, end), start, method="DOP853", rtol=1e-11, atol=1e-13).y[:, -1]
    return found[:2], found[2:10].reshape(2, 4), found[10:].reshape(2, 4, 4)


@pytest.mark.slow
def test_second_order_sensitivities_match_variational_equations_in_scipy(memory):
    z = numbers(0.5, -0.3, 0.8, 0.4)
    y, S, T = variational_equations(z[:2].numpy(), z[2:].numpy(), 1.5)

    def end(z):
        return odeint(driven, z[:2], numbers(0.0, 1.5), z[2:], memory=memory, **TIGHT)[-1]

    np.testing.assert_allclose(end(z), y, rtol=1e-8)
    np.testing.assert_allclose(torch.func.jacrev(end)(z), S, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(torch.func.hessian(end)(z), T, rtol=1e-5, atol=1e-6)


def test_gradients_match_differences_of_scipys_solutions(memory):
    p = numbers(0.8, 0.4)

    def scipys(p):
        options = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-13}

        def rates(t, y):
            return [y[1], p[0] * (1 - y[0] ** 2) * y[1] - y[0] + p[1] * math.cos(t)]

        return scipy.integrate.solve_ivp(rates, (0, 2), [0.5, -0.3], **options).y[0, -1]

    found = torch.func.grad(lambda p: odeint(driven, numbers(0.5, -0.3), numbers(0.0, 2.0), p, memory=memory)[-1, 0])(p)
    h = 1e-4
    differences = [(scipys(p.numpy() + h * e) - scipys(p.numpy() - h * e)) / (2 * h) for e in np.eye(2)]
    np.testing.assert_allclose(found, differences, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_complex_states_in_a_tree_pass_gradgradcheck(memory):
    def loss(a, b, w):
        def f(t, y):
            return {"a": 1j * w * y["a"] * y["b"], "b": -y["b"] * y["a"].abs().square().sum()}

        y = odeint(f, {"a": torch.view_as_complex(a), "b": b}, numbers(0.6, 0.2, -0.1), memory=memory, **TIGHT)
        return (y["a"].real * numbers(1.0, 2.0, 3.0)[:, None]).sum() + y["b"].sum()

    point = [numbers([1.0, 0.5], [0.0, 0.2]), numbers(0.3)[0], numbers(1.3)[0]]
    point = [each.requires_grad_() for each in point]
    torch.autograd.gradcheck(loss, point, atol=1e-5)
    torch.autograd.gradgradcheck(loss, point, atol=1e-4)


def test_closed_over_parameters_have_gradients_and_second_derivatives(memory):
    k = numbers(0.7, -0.4).requires_grad_()
    v = numbers(1.0, 2.0)
    y = odeint(lambda t, y: k * y**2, numbers(0.5, 0.8), numbers(0.0, 1.0), memory=memory, **TIGHT)[-1]
    exact = numbers(0.5, 0.8) / (1 - k * numbers(0.5, 0.8))
    for order in (1, 2):
        (found,) = torch.autograd.grad(y @ v, k, create_graph=True)
        (truth,) = torch.autograd.grad(exact @ v, k, create_graph=True)
        torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-7, msg=f"order {order}")
        y, exact = found, truth


@pytest.mark.slow
def test_module_in_functional_call_has_the_hvp_of_its_steps(memory):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()

    class End(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, y, memory):
            return odeint(lambda t, y: self.net(y), y, TIMES, memory=memory, **TIGHT)[-1].square().sum()

    module = End()
    parameters = {name: each.detach() for name, each in module.named_parameters()}
    directions = {name: torch.ones_like(each) for name, each in parameters.items()}

    def product(memory):
        def f(p):
            return torch.func.functional_call(module, p, (numbers(0.5, -1.0), memory))

        return hodiff.hvp(f, parameters, directions)

    torch.testing.assert_close(product(memory), product("steps"), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_vmap_matches_a_loop(memory):
    ys, ks = numbers([0.5, -0.2], [0.1, 0.8], [-0.4, 0.3]), numbers(0.3, 1.0, 2.0)

    def end(y, k):
        return odeint(lambda t, y: k * y.sin(), y, TIMES, memory=memory, **TIGHT)[-1].cos().sum()

    for f in (end, torch.func.grad(end), torch.func.grad(end, argnums=1), torch.func.hessian(end)):
        loop = torch.stack([f(y, k) for y, k in zip(ys, ks, strict=True)])
        torch.testing.assert_close(torch.func.vmap(f)(ys, ks), loop, rtol=1e-6, atol=1e-7)


def test_forward_mode_of_torch_autograd_matches(memory):
    y0 = numbers(0.5, -0.2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(y0, torch.ones_like(y0))
        y = odeint(lambda t, y: y**2, dual, numbers(0.0, 1.0), memory=memory, **TIGHT)[-1]
        found = torch.autograd.forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(found, 1 / (1 - y0) ** 2, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_laplacian_of_a_solution_is_that_of_the_closed_form(memory):
    def f(y0):
        return odeint(lambda t, y: y**2, y0, numbers(0.0, 1.0), memory=memory, **TIGHT)[-1].sum()

    y0 = numbers(0.5, -0.2)
    torch.testing.assert_close(hodiff.laplacian(f)(y0), (2 / (1 - y0) ** 3).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_force_of_an_energy_has_its_hessian(memory):
    def by_autograd(t, y):
        with torch.enable_grad():
            q = y if y.requires_grad else y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(q[0] ** 2 / 2 - q[1].cos(), q, create_graph=True)
        return torch.stack([-slope[1], slope[0]])

    def written_out(t, y):
        return torch.stack([-y[1].sin(), y[0]])

    def hessian(f):
        return hodiff.hessian_matrix(lambda y: odeint(f, y, TIMES, memory=memory, **TIGHT)[-1].sum(), numbers(0.5, 0.3))

    torch.testing.assert_close(hessian(by_autograd), hessian(written_out), rtol=1e-7, atol=1e-8)


def test_random_draws_are_the_same_in_all_calls(memory):
    torch.manual_seed(3)
    factor = float(torch.randn((), dtype=D))
    torch.manual_seed(3)
    y0 = numbers(0.5).requires_grad_()
    y = odeint(lambda t, y: y * torch.randn((), dtype=D), y0, numbers(0.0, 1.0), memory=memory, **TIGHT)[-1]
    (found,) = torch.autograd.grad(y.sum(), y0)
    assert float(found) == pytest.approx(math.exp(factor), rel=1e-7)


def test_float32_matches_float64(memory):
    def gradient(dtype):
        y0, t = torch.tensor([0.5, -0.2], dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)

        def f(y0):
            return odeint(lambda t, y: y.sin(), y0, t, rtol=1e-5, atol=1e-6, memory=memory)[-1].sum()

        return torch.func.grad(f)(y0)

    torch.testing.assert_close(gradient(torch.float32).double(), gradient(D), rtol=1e-4, atol=1e-5)


def test_graph_of_checkpoints_is_smaller_and_that_of_the_adjoint_constant():
    def stored(memory, steps):
        sizes = {}

        def keep(tensor):
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor  # alive, so that no other tensor gets its memory

        y0 = torch.full((1000,), 0.3, dtype=D, requires_grad=True)
        options = {"rtol": 1e-6} if memory == "adjoint" else {"step_size": 1 / steps}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            odeint(lambda t, y: y.sin().cos(), y0, numbers(0.0, 1.0), memory=memory, **options)
        return sum(sizes.values()) / y0.nbytes

    few, many = ([stored(memory, steps) for memory in MEMORIES] for steps in (9, 144))
    assert many[0] > 14 * few[0]
    assert many[1] < 5 * few[1] < few[0]
    assert many[2] == few[2] < 5


def test_singular_stiff_and_infinite_solutions_raise():
    with pytest.raises(hodiff.ConvergenceError, match=r"odeint: stopped at t = 1\.0*.*singular") as caught:
        odeint(lambda t, y: y * y, numbers(1.0), numbers(0.0, 0.5, 2.0))
    torch.testing.assert_close(caught.value.result, numbers([1.0], [2.0]), rtol=1e-6, atol=0)
    with pytest.raises(hodiff.ConvergenceError, match=r"stopped at t = 0\.0.*50 steps have been tried.*stiff"):
        odeint(lambda t, y: -1e4 * (y - t.cos()), numbers(1.0), numbers(0.0, 10.0), max_steps=50)
    with pytest.raises(hodiff.ConvergenceError, match="not finite: take a smaller step_size"):
        odeint(lambda t, y: y**9, numbers(1e30), numbers(0.0, 1.0), step_size=0.5)
    with pytest.raises(hodiff.InputError, match="finite numbers at the first time, 0"):
        odeint(lambda t, y: y / 0, numbers(1.0), numbers(0.0, 1.0))
    with pytest.raises(hodiff.ConvergenceError, match=r"odeint: stopped at t = 1\b"):
        odeint(lambda t, y: 0 * y + torch.sqrt(1 - t), numbers(0.0), numbers(0.0, 2.0))


def test_adjoint_that_leaves_the_solution_raises_and_more_times_help():
    y0 = numbers(1.0, 0.5).requires_grad_()

    def decay(t, y):
        return -40 * (y - t.cos())

    y = odeint(decay, y0, numbers(0.0, 1.0), rtol=1e-5, memory="adjoint")[-1]
    with pytest.raises(hodiff.ConvergenceError, match=r"t = 1 back to 0 misses .*memory='checkpoints'"):
        torch.autograd.grad(y.sum(), y0)
    y = odeint(decay, y0, torch.linspace(0, 0.5, 6, dtype=D), rtol=1e-5, memory="adjoint")[-1]
    (found,) = torch.autograd.grad(y.sum(), y0)
    torch.testing.assert_close(found, torch.full((2,), math.exp(-20), dtype=D), rtol=0, atol=1e-6)


def test_adjoint_that_blows_up_names_the_adjoint_and_more_times_help():
    def end(y0, times, memory="adjoint", **options):  # y² is a logistic function of 2 k t
        return odeint(lambda t, y: 20 * (y - y**3), y0, times, rtol=1e-4, atol=1e-6, memory=memory, **options)[-1].sum()

    y0, whole = numbers(2.0), numbers(0.0, 0.5)
    adjoint = r"memory='adjoint': the adjoint equation from t = 0.5 back to 0 stopped at t = .*memory='checkpoints'"
    with pytest.raises(hodiff.ConvergenceError, match=adjoint):
        torch.func.grad(end)(y0, whole)
    for derivative in (torch.func.grad(end), hodiff.hessian(end)):
        with pytest.raises(
            hodiff.ConvergenceError, match=r"20 steps have been tried.* raise max_steps, or pass memory"
        ):
            derivative(y0, whole, max_steps=20)
    decay = math.exp(-20)
    exact = decay * (4 - 3 * decay) ** -1.5  # of 2 / sqrt(4 - 3 exp(-40 t)) by its first value
    found = torch.func.grad(end)(y0, torch.linspace(0, 0.5, 11, dtype=D))
    torch.testing.assert_close(found.item(), exact, rtol=0, atol=1e-6)


def test_hidden_and_stored_tensors_are_refused(monkeypatch):
    class Storing:
        def __call__(self, t, y):
            self.last = y * 2
            return -y

    monkeypatch.setattr(math, "hidden", numbers(2.0).requires_grad_(), raising=False)
    y0 = numbers(0.5).requires_grad_()
    for memory in ("checkpoints", "adjoint"):
        with pytest.raises(hodiff.InputError, match="odeint: f: expected every tensor that f differentiates"):
            odeint(lambda t, y: math.hidden * y, y0, TIMES, memory=memory)
        with pytest.raises(hodiff.InputError, match="odeint: f: expected f to return all tensors"):
            odeint(Storing(), y0, TIMES, memory=memory)


WRONG = {
    "times that stand": ({"t": numbers(0.0, 1.0, 1.0)}, r"t: expected finite times that increase.* at 1 and 2"),
    "a number for times": ({"t": 1.0}, r"t: expected a tensor of times \(T,\).*got float"),
    "whole numbers": ({"y0": torch.ones(2, dtype=torch.int64)}, "cannot differentiate with respect to y0"),
    "no function": ({"f": 3}, "f: expected a callable, got int"),
    "another shape": ({"f": lambda t, y: y.sum()}, r"f: expected a result like y0, \(2,\) float64, got \(\) float64"),
    "another dtype": ({"f": lambda t, y: y.float()}, r"f: expected a result like y0, .* got \(2,\) float32"),
    "another structure": ({"f": lambda t, y: (y, y)}, "f: expected a result in the structure of y0"),
    "a method": ({"method": "euler"}, "method: expected one of"),
    "a memory": ({"memory": "none"}, "memory: expected one of"),
    "a fixed step for the adjoint": ({"memory": "adjoint", "step_size": 0.1}, "step_size: expected None"),
    "a step": ({"step_size": -0.1}, "step_size: expected a positive finite number"),
    "rtol": ({"rtol": 0.0}, "rtol: expected a positive finite number"),
    "max_steps": ({"max_steps": 0}, "max_steps: expected an int of 1 or more"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_rejected(case):
    options, words = WRONG[case]
    given = {"f": lambda t, y: -y, "y0": torch.ones(2, dtype=D), "t": numbers(0.0, 1.0), **options}
    with pytest.raises(hodiff.InputError, match=f"odeint: {words}"):
        odeint(given.pop("f"), given.pop("y0"), given.pop("t"), **given)


def test_vmap_over_times_is_rejected():
    with pytest.raises(hodiff.InputError, match=r"odeint: t: expected no torch\.func\.vmap over the times"):
        torch.func.vmap(lambda t: odeint(lambda t, y: -y, numbers(1.0), t))(numbers([0.0, 1.0], [0.0, 2.0]))


def of_an_output_buffer(buffer):
    return lambda t, y: torch.neg(y, out=buffer)


def changing_its_argument(t, y):
    y -= 1
    return -y


@pytest.mark.parametrize("memory", ["steps", "checkpoints", "adjoint"])
def test_functions_that_write_in_place_are_right_or_refused(memory):
    y0, times = torch.tensor([0.5, -0.3], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    same_buffer = of_an_output_buffer(torch.empty_like(y0))
    end = hodiff.odeint(same_buffer, y0, times, memory=memory)[-1]
    torch.testing.assert_close(end, y0 * math.exp(-1), rtol=1e-6, atol=0)
    before = y0.clone()
    with pytest.raises(hodiff.InputError, match="odeint: f: expected a function that does not change y in place"):
        hodiff.odeint(changing_its_argument, y0, times, memory=memory)
    assert y0.equal(before)


def test_solution_in_bfloat16():
    y0, times = torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([0.0, 1.0])
    end = hodiff.odeint(lambda t, y: -y, y0, times, step_size=0.25)[-1]
    assert end.dtype is torch.bfloat16
    torch.testing.assert_close(end.double(), 0.5 * torch.ones(1, dtype=torch.float64) / math.e, rtol=0.02, atol=0)


def test_gradients_in_several_threads_add_up():
    w, y0 = torch.tensor(0.8, dtype=torch.float64, requires_grad=True), torch.tensor([0.5, -0.3], dtype=torch.float64)
    times = torch.tensor([0.0, 0.7], dtype=torch.float64)

    # The variable w itself holds plain tensors while the equations are solved, so the caller keeps another.
    def gradient(parameter):
        end = hodiff.odeint(lambda t, y: w * y.sin(), y0, times, rtol=1e-4, memory="adjoint")[-1]
        return torch.autograd.grad(end.sum(), parameter)[0]

    expected = gradient(w)
    for found in in_threads(gradient, [w], times=12):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("memory", ["steps", "checkpoints"])
@pytest.mark.parametrize("method", METHODS)
def test_derivatives_at_a_state_of_rest_are_those_of_the_linear_system(method, memory):
    """The error of the solution is 0 there, and steps of its length had derivatives that were wrong by factors."""
    A = numbers([0.0, 1.0], [-4.0, -0.2])
    t = numbers(0.0, 5.0)

    def swing(t, y):
        return torch.stack([y[1], -0.2 * y[1] - 4 * y[0].sin()])

    def end(y0):
        return odeint(swing, y0, t, method=method, memory=memory, rtol=1e-5)[-1]

    rest = numbers(0.0, 0.0).requires_grad_()
    found = torch.autograd.functional.jacobian(end, rest)
    torch.testing.assert_close(found, torch.linalg.matrix_exp(5 * A), rtol=0, atol=1e-4)
    # The state stays at rest, whether the steps are chosen for derivatives or not.
    torch.testing.assert_close(end(rest.detach()), rest.detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of dynamo
@pytest.mark.parametrize("memory", ["adjoint", "checkpoints"])
def test_products_of_solutions_in_compiled_code_match(memory):
    """The call breaks the graph, and dynamo must not compile the rules that run later."""
    y0, times = torch.tensor([0.4, -0.7], dtype=torch.float64), torch.tensor([0.0, 0.05], dtype=torch.float64)
    weight, v = torch.tensor([[0.3, -0.2], [0.5, 0.1]], dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)

    def product(weight, v):
        def loss(weight):
            return (
                odeint(lambda t, y, w: (w @ y).tanh(), y0, times, weight, memory=memory, rtol=1e-4)[-1].square().sum()
            )

        return hodiff.hvp(loss, weight, v)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(product, backend="aot_eager")(weight, v), product(weight, v))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="hodiff's odeint reads numbers of tensors"):
        torch.compile(product, backend="aot_eager", fullgraph=True)(weight, v)
