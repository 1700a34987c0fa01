"""Tests of ODE solutions by Taylor series, against closed forms, mpmath's series and solutions, and SciPy; refusals."""

import math
import weakref
from functools import partial

import mpmath as mp
import numpy as np
import pytest
import torch
from mpmath_series import D, number
from scipy.integrate import solve_ivp
from torch import nn

import hodiff
from hodiff.taylor import ode_coefficients, odeint_taylor
from hodiff.taylor.jets import Jet
from hodiff.taylor.kept_coefficients import Memory

TIGHT = {"rtol": 1e-13, "atol": 1e-14}


def lorenz(t, y):
    x, u, z = y.unbind(-1)
    return torch.stack([10 * (u - x), x * (28 - z) - u, x * u - 8 / 3 * z], -1)


def kepler(t, state):
    q, v = state["q"], state["v"]
    return {"q": v, "v": -q * q.square().sum(-1, keepdim=True) ** -1.5}


def kepler_start(eccentricity):
    """Return the state at the nearest point of an ellipse with half axis 1, whose period is 2 π."""
    e = eccentricity
    return {"q": torch.tensor([1 - e, 0.0], dtype=D), "v": torch.tensor([0.0, math.sqrt((1 + e) / (1 - e))], dtype=D)}


# The equation, its initial value, and its solution in mpmath, whose series is the reference.
EQUATIONS = {
    "exponential": (lambda t, y: y, 1.0, mp.exp),
    "logistic": (lambda t, y: y * (1 - y), 0.2, lambda t: 1 / (1 + 4 * mp.exp(-t))),
    "of time alone": (lambda t, y: torch.cos(t) + 3 * t**2, 1.0, lambda t: 1 + mp.sin(t) + t**3),
    "by time": (lambda t, y: t * y, 1.0, lambda t: mp.exp(t * t / 2)),
    "tangent": (lambda t, y: 1 + y * y, 0.0, mp.tan),
    "root": (lambda t, y: 1 / (2 * y.sqrt().square()), 1.0, lambda t: mp.sqrt(1 + t)),
    "negative power": (lambda t, y: y**-2.5, 1.0, lambda t: (1 + mp.mpf(7) / 2 * t) ** (mp.mpf(2) / 7)),
    "quotient": (lambda t, y: y / (1 + t), 1.0, lambda t: 1 + t),
    "matrix": (lambda t, y: (y[None] @ torch.ones(1, 1, dtype=D)).squeeze(0) - 1, [2.0], lambda t: 1 + mp.exp(t)),
    "sine": (lambda t, y: torch.sin(y), 0.5, lambda t: 2 * mp.atan(mp.tan(mp.mpf(1) / 4) * mp.exp(t))),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_coefficients_match_closed_form(name):
    f, y0, solution = EQUATIONS[name]
    found = ode_coefficients(f, 0.0, torch.tensor(y0, dtype=D), 12)
    with mp.workdps(40):
        right = [float(each) for each in mp.taylor(solution, 0, 12)]
    np.testing.assert_allclose(torch.stack(found).flatten(), right, rtol=1e-12, atol=1e-15)


def test_coefficients_at_another_time_match():
    found = ode_coefficients(lambda t, y: t * y, 2.0, number(math.e**2), 6)
    with mp.workdps(40):
        right = [float(each) for each in mp.taylor(lambda t: mp.exp(t * t / 2), 2, 6)]
    np.testing.assert_allclose(torch.stack(found), right, rtol=1e-12)


def test_vanishing_coefficients_are_zero():
    found = ode_coefficients(lambda t, y: torch.ones_like(y), 0.0, torch.zeros(2, dtype=D), 3)
    assert torch.stack(found).tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("name", EQUATIONS)
def test_solutions_match_closed_form(name):
    f, y0, solution = EQUATIONS[name]
    t = torch.linspace(0, 1, 5, dtype=D)
    found = odeint_taylor(f, torch.tensor(y0, dtype=D), t, **TIGHT)
    with mp.workdps(30):
        right = [float(solution(mp.mpf(each))) for each in t.tolist()]
    np.testing.assert_allclose(found.flatten(), right, rtol=1e-11)


def test_van_der_pol_matches_mpmath():
    """Solutions of Van der Pol's equation match mpmath's own Taylor method at thirty digits."""
    found = odeint_taylor(
        lambda t, y: torch.stack([y[1], (1 - y[0] ** 2) * y[1] - y[0]]),
        torch.tensor([2.0, 0.0], dtype=D),
        torch.tensor([0.0, 0.7, 1.5], dtype=D),
        **TIGHT,
    )
    with mp.workdps(30):
        solution = mp.odefun(lambda t, y: [y[1], (1 - y[0] ** 2) * y[1] - y[0]], 0, [2, 0])
        right = [[float(each) for each in solution(t)] for t in (0, mp.mpf("0.7"), mp.mpf("1.5"))]
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_lorenz_matches_scipy():
    t = torch.linspace(0, 1.5, 4, dtype=D)
    found = odeint_taylor(lorenz, torch.tensor([1.0, 2.0, 3.0], dtype=D), t, **TIGHT)

    def slope(_, y):
        x, u, z = y
        return [10 * (u - x), x * (28 - z) - u, x * u - 8 / 3 * z]

    right = solve_ivp(slope, (0, 1.5), [1.0, 2, 3], t_eval=t.numpy(), method="DOP853", rtol=3e-14, atol=1e-14).y.T
    # Errors grow by about e to the 0.9 t.
    np.testing.assert_allclose(found, right, rtol=1e-9)


@pytest.mark.slow
def test_kepler_conserves_energy():
    """Two periods of an ellipse end at the start, and conserve the energy."""
    start = kepler_start(0.5)
    found = odeint_taylor(kepler, start, torch.linspace(0, 4 * math.pi, 5, dtype=D), rtol=1e-11, atol=1e-13)
    energy = found["v"].square().sum(-1) / 2 - 1 / found["q"].square().sum(-1).sqrt()
    np.testing.assert_allclose(energy, -0.5, rtol=1e-9)
    for name in start:
        np.testing.assert_allclose(found[name][-1], start[name], atol=1e-8)


@pytest.mark.slow
def test_kepler_over_many_periods_returns_to_the_start():
    start = kepler_start(0.6)
    found = odeint_taylor(kepler, start, torch.tensor([0.0, 20 * math.pi], dtype=D), rtol=1e-15, atol=1e-16)
    energy = found["v"].square().sum(-1) / 2 - 1 / found["q"].square().sum(-1).sqrt()
    np.testing.assert_allclose(energy, -0.5, rtol=1e-12)
    np.testing.assert_allclose(found["q"][-1], start["q"], atol=1e-9)


def test_backward_time_and_complex_values_match():
    t = torch.tensor([2.0, 1.5, 0.0], dtype=D)
    found = odeint_taylor(lambda t, y: 1j * y, torch.tensor([1 + 0j], dtype=torch.complex128), t, **TIGHT)
    torch.testing.assert_close(found[:, 0], torch.exp(1j * (t - 2)), rtol=1e-12, atol=0)


def test_batches_of_initial_values_match_single_ones():
    starts = torch.rand(2, 3, dtype=D, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0.0, 0.1], dtype=D)
    together = odeint_taylor(lorenz, starts, t, **TIGHT)
    assert together.shape == (2, 2, 3)
    for i, start in enumerate(starts):
        torch.testing.assert_close(together[:, i], odeint_taylor(lorenz, start, t, **TIGHT), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("order", [1, 3, 6])
def test_error_falls_with_the_order_of_the_method(order):
    def off(size):
        t = torch.tensor([0.0, 1.0], dtype=D)
        found = odeint_taylor(lambda t, y: -y * t, number(1.0), t, order=order, step_size=size)
        return abs(float(found[1]) - math.exp(-0.5))

    assert math.log2(off(1 / 16) / off(1 / 32)) == pytest.approx(order, abs=0.35)


def test_errors_stay_within_tolerances():
    for rtol in (1e-4, 1e-7, 1e-11):
        t = torch.linspace(0, 10, 21, dtype=D)
        found = odeint_taylor(lambda t, y: torch.stack([y[1], -y[0]]), torch.tensor([0.0, 1.0], dtype=D), t, rtol=rtol)
        error = (found[:, 0] - t.sin()).abs().max()
        assert error < 30 * rtol


def test_float32_solution_matches():
    t = torch.linspace(0, 3, 4)
    found = odeint_taylor(lambda t, y: -y, torch.ones(2), t)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, 0], torch.exp(-t))


def test_full_output_has_statistics_and_interpolation():
    t = torch.linspace(0, 4, 3, dtype=D)
    f, calls = EQUATIONS["by time"][0], []

    def counted(t, y):
        calls.append(t)
        return -f(t, y)

    found = odeint_taylor(counted, number(1.0), t, full_output=True, rtol=1e-10, atol=1e-12)
    # One more evaluation with plain tensors checks the first pass.
    assert found.evaluations == len(calls) - 1
    assert found.steps == len(found.orders) == len(found.step_sizes)
    assert sum(found.step_sizes) == pytest.approx(4)
    # The order is the smaller of 1 - log(rtol) / 2 and 1 - log(atol) / 2, as the solution falls below atol / rtol.
    assert set(found.orders) == {13, 15}
    torch.testing.assert_close(found.y, torch.exp(-t * t / 2), rtol=1e-8, atol=1e-10)
    between = torch.tensor([[3.3, 0.1, 4.0], [0.0, 1.7, 2.9]], dtype=D)
    torch.testing.assert_close(found(between), torch.exp(-between * between / 2), rtol=1e-8, atol=1e-10)


def test_step_beyond_the_accuracy_of_the_series_is_rejected():
    """The first forty derivatives of t^40 are zero at 0, so the last coefficients allow any step."""
    t = torch.tensor([0.0, 1.3], dtype=D)
    found = odeint_taylor(lambda t, y: t**40 + 0 * y, number(0.0), t, full_output=True, order=8)
    assert found.rejected > 0
    torch.testing.assert_close(found.y[1], number(1.3**41 / 41), rtol=1e-6, atol=0)


def test_kinks_reject_steps():
    """|sin| has kinks at multiples of π, before which steps become short."""
    t = torch.tensor([0.0, 5.0], dtype=D)
    found = odeint_taylor(lambda t, y: torch.sin(t).abs() + 0 * y, number(0.0), t, full_output=True)
    assert found.rejected > 0
    torch.testing.assert_close(found.y[1], number(2 + 1 + math.cos(5.0)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_match_closed_forms(checkpoint):
    """Derivatives by y0, r, t and t0, and a second one, match y = 1 / (1 + (1/y0 - 1) exp(-r t))."""

    def solution(y0, r, t):
        return 1 / (1 + (1 / y0 - 1) * torch.exp(-r * (t[1:] - t[0])))

    def integrated(y0, r, t):
        return odeint_taylor(lambda t, y: r * y * (1 - y), y0, t, **TIGHT, checkpoint=checkpoint)[1:]

    given = [each.requires_grad_() for each in (number(0.2), number(1.3), torch.tensor([0.5, 1.0, 2.0], dtype=D))]
    weights = torch.tensor([1.0, 2.0], dtype=D)
    found = torch.autograd.grad((integrated(*given) * weights).sum(), given, create_graph=True)
    right = torch.autograd.grad((solution(*given) * weights).sum(), given, create_graph=True)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)
    twice = torch.autograd.grad(found[1], given)
    torch.testing.assert_close(twice, torch.autograd.grad(right[1], given), rtol=1e-8, atol=1e-10)


class Saved:
    """A tensor that autograd saves."""

    def __init__(self, x):
        self.x = x


def saved_bytes(run):
    """Return the bytes that autograd keeps saved for the result of a function."""
    saved = weakref.WeakSet()

    def pack(x):
        saved.add(kept := Saved(x))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
        result = run()
    found = sum(each.x.numel() * each.x.element_size() for each in saved)
    assert result.requires_grad
    return found


@pytest.mark.slow
def test_checkpoints_give_the_same_derivatives_with_less_memory():
    """Steps that are computed again have equal derivatives of two orders; only states are stored between them."""
    t = torch.tensor([0.0, 0.05, 0.6, 1.0], dtype=D)
    net = nn.Linear(2, 2).double()
    given = [torch.tensor([1.0, -0.5], dtype=D).requires_grad_(), number(0.3).requires_grad_(), t.requires_grad_()]

    def end(y0, r, t, checkpoint):
        f = lambda t, y, r: net(y).tanh() - r * y * torch.cos(t)  # noqa: E731
        return odeint_taylor(f, y0, t, r, order=8, step_size=0.3, checkpoint=checkpoint)

    plain, again = (end(*given, each) for each in (False, True))
    assert torch.equal(plain, again)
    leaves = [*given, *net.parameters()]
    weights = torch.linspace(1, 2, 8, dtype=D).view(4, 2)
    first = [torch.autograd.grad((each * weights).square().sum(), leaves, create_graph=True) for each in (plain, again)]
    torch.testing.assert_close(*first, rtol=1e-12, atol=1e-12)
    second = [torch.autograd.grad(sum((each**2).sum() for each in found), leaves) for found in first]
    torch.testing.assert_close(*second, rtol=1e-11, atol=1e-11)
    moved = [
        torch.func.jvp(lambda t: end(*given[:2], t, checkpoint), (given[2],), (given[2],))[1]
        for checkpoint in (False, True)
    ]
    torch.testing.assert_close(*moved, rtol=1e-12, atol=1e-12)
    # The state of random numbers takes 5 kB for each step, so states have to be large.
    given[0] = torch.ones(2000, 2, dtype=D, requires_grad=True)
    stored = [saved_bytes(partial(end, *given, checkpoint=each)) for each in (False, True)]
    assert stored[1] < stored[0] / 50


@pytest.mark.slow
def test_gradients_match_scipy_differences():
    """Derivatives of a damped pendulum by its parameters and its start match SciPy's solutions."""
    given = torch.tensor([1.2, 0.3, 2.0, 0.0], dtype=D)

    def end(given):
        stiffness, friction, *_ = given
        t = torch.tensor([0.0, 0.4], dtype=D)
        f = lambda t, y, friction: torch.stack([y[1], -stiffness * y[0].sin() - friction * y[1]])  # noqa: E731
        return odeint_taylor(f, given[2:], t, friction, **TIGHT)[1]

    def by_scipy(given):
        stiffness, friction, *start = given
        slope = lambda t, y: [y[1], -stiffness * math.sin(y[0]) - friction * y[1]]  # noqa: E731
        return solve_ivp(slope, (0, 0.4), start, method="DOP853", rtol=1e-13, atol=1e-13).y[:, -1]

    found = torch.func.jacrev(end)(given)
    torch.testing.assert_close(torch.func.jacfwd(end)(given), found)
    step = 1e-4
    columns = [
        (by_scipy(given.numpy() + row) - by_scipy(given.numpy() - row)) / (2 * step)
        for row in step * np.eye(len(given))
    ]
    np.testing.assert_allclose(found, np.stack(columns, 1), rtol=1e-6, atol=1e-7)


def test_training_a_network_lowers_the_loss():
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for each in net.parameters():
        each.data = torch.randn(each.shape, generator=generator, dtype=D) / 2
    t, y0 = torch.tensor([0.0, 1.0], dtype=D), torch.ones(3, 2, dtype=D)

    def loss():
        return odeint_taylor(lambda t, y: net(y), y0, t, **TIGHT)[1].square().sum()

    (found,) = torch.autograd.grad(loss(), net[0].weight)
    for place in ((0, 0), (3, 1)):
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                net[0].weight[place] += step
                ends.append(float(loss()))
                net[0].weight[place] -= step
        assert float(found[place]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_laplacian_of_a_flow_matches_closed_form():
    """Jets of jets: y = y0 / (1 - t y0) has the second derivative 2 t / (1 - t y0)³."""
    t = torch.tensor([0.0, 0.5], dtype=D)
    found = hodiff.laplacian(lambda y0: odeint_taylor(lambda t, y: y * y, y0, t, **TIGHT)[1])(number(0.6))
    torch.testing.assert_close(found, number(1 / 0.7**3), rtol=1e-9, atol=0)


def test_random_numbers_are_the_same_in_all_passes():
    def f(t, y):
        return y * torch.randn((), dtype=D)

    torch.manual_seed(3)
    factor = float(torch.randn((), dtype=D))
    torch.manual_seed(3)
    found = ode_coefficients(f, 0.0, number(1.0), 6)
    expected = [factor**k / math.factorial(k) for k in range(7)]
    np.testing.assert_allclose(torch.stack(found), expected, rtol=1e-12)


def writing_in_place(t, y):
    z = y.clone()
    z[0] = z[0] * z[1]
    z *= y
    return z


def with_fresh_constants(t, y):
    A = torch.eye(2, dtype=D) * 3
    return torch.tensor([2.0, 0.5], dtype=D) * y.sin() + (A @ y) / (1 + y.square().sum())


@pytest.mark.parametrize("f", [writing_in_place, with_fresh_constants, lambda t, y: torch.softmax(y, 0).cumprod(0)])
def test_passes_with_memory_match_passes_without(f, monkeypatch):
    y0 = torch.tensor([0.4, 0.7], dtype=D)
    found = ode_coefficients(f, 0.0, y0, 9)
    monkeypatch.setattr(Memory, "recall", lambda *_: [])
    torch.testing.assert_close(found, ode_coefficients(f, 0.0, y0, 9), rtol=1e-13, atol=0)


def test_changed_values_are_recomputed():
    """Values that change from call to call are recomputed, even at the same place in the code."""
    calls = []

    def f(t, y):
        if isinstance(y, Jet):
            calls.append(0)
        z = y * torch.tensor(float(len(calls) > 3) + 1, dtype=D)
        return z * z

    # y' = y², and from the fourth call on y' = 4 y², where coefficient 3 uses all earlier ones.
    found = ode_coefficients(f, 0.0, number(1.0), 4)
    assert [float(each) for each in found] == pytest.approx([1, 1, 1, 1, 4 * 4 / 4])


def test_singular_and_non_finite_solutions_raise():
    t = torch.tensor([0.0, 0.5, 2.0], dtype=D)
    with pytest.raises(
        hodiff.ConvergenceError, match=r"stopped at t = 1\.0.*as the step would be .*singular"
    ) as caught:
        odeint_taylor(lambda t, y: y * y, number(1.0), t)
    torch.testing.assert_close(caught.value.result.y, torch.tensor([1.0, 2.0], dtype=D), rtol=1e-6, atol=0)
    with pytest.raises(hodiff.ConvergenceError, match=r"stopped at t = 1\b.*not finite near it"):
        odeint_taylor(lambda t, y: 0 * y + torch.sqrt(1 - t), number(0.0), t)
    with pytest.raises(hodiff.ConvergenceError, match="after the next step is not finite: take a smaller step_size"):
        odeint_taylor(lambda t, y: y**5, number(1e30), t, order=20, step_size=0.5)
    with pytest.raises(hodiff.ConvergenceError, match="5 steps have been tried: raise max_steps"):
        odeint_taylor(lambda t, y: -100 * y, number(1.0), t, max_steps=5)


WRONG = {
    "times that stand": ({"t": torch.tensor([0.0, 1.0, 1.0])}, r"t: expected finite times that increase.* at 1 and 2"),
    "times back and forth": (
        {"t": torch.tensor([0.0, 2.0, 1.0])},
        "t: expected finite times .*, got 2 and 1 at 1 and 2",
    ),
    "times that are no numbers": ({"t": torch.tensor([0.0, math.nan])}, "t: expected finite times"),
    "a number for times": ({"t": 1.0}, r"t: expected a tensor of times \(T,\).*got float"),
    "a time": ({"t": torch.tensor(1.0)}, r"t: expected a tensor of times"),
    "whole numbers": (
        {"y0": torch.ones(2, dtype=torch.int64)},
        "cannot differentiate with respect to y0: expected a real",
    ),
    "an infinite start": (
        {"y0": torch.tensor([1.0, math.inf])},
        "y0 or f: expected finite numbers at the first time, 0",
    ),
    "no function": ({"f": 3}, "f: expected a callable, got int"),
    "another shape": ({"f": lambda t, y: y.sum()}, r"f: expected a result like y0, \(2,\) float32, got \(\) float32"),
    "a number": ({"f": lambda t, y: 1.0}, r".* got \(\) float32; .* in tensors such as torch\.ones_like"),
    "another dtype": ({"f": lambda t, y: y.double()}, r"f: expected a result like y0, .* got \(2,\) float64"),
    "another structure": ({"f": lambda t, y: (y, y)}, "f: expected a result in the structure of y0"),
    "an order": ({"order": 0}, "order: expected an int of 1 or more"),
    "a fixed step alone": ({"step_size": 0.1}, "order: expected an int of 1 or more with a fixed step_size"),
    "a step": ({"step_size": -0.1, "order": 3}, "step_size: expected a positive finite number"),
    "a series without memory": ({"checkpoint": True, "full_output": True}, "full_output: expected False with checkp"),
    "rtol": ({"rtol": 0.0}, "rtol: expected a positive finite number"),
    "atol": ({"atol": -1.0}, "atol: expected a positive finite number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_odeint_rejects_bad_arguments(case):
    options, words = WRONG[case]
    given = {"f": lambda t, y: -y, "y0": torch.ones(2), "t": torch.tensor([0.0, 1.0]), **options}
    with pytest.raises(hodiff.InputError, match=f"odeint_taylor: {words}"):
        odeint_taylor(given.pop("f"), given.pop("y0"), given.pop("t"), **given)


def test_ode_coefficients_rejects_bad_arguments():
    with pytest.raises(hodiff.InputError, match="ode_coefficients: order: expected an int of 1 or more"):
        ode_coefficients(lambda t, y: y, 0.0, torch.ones(2), 0)
    with pytest.raises(hodiff.InputError, match=r"expected no torch\.func\.vmap around the call"):
        torch.func.vmap(lambda y: odeint_taylor(lambda t, y: -y, y, torch.tensor([0.0, 1.0])))(torch.ones(2, 3))
    found = odeint_taylor(lambda t, y: -y, torch.ones(2), torch.tensor([0.0, 1.0]), full_output=True)
    with pytest.raises(hodiff.InputError, match=r"OdeSolution: t: expected times between 0 and 1, got \(1,\)"):
        found(torch.tensor([1.5]))


def _by_autograd(t, y):
    y = y.requires_grad_()
    return torch.autograd.grad(y.sin().sum(), y, create_graph=True)[0]


def _by_autograd_where_needed(t, y):
    y = y if y.requires_grad else y.requires_grad_()
    return torch.autograd.grad(y.sin().sum(), y, create_graph=True)[0]


@pytest.mark.parametrize(
    "f",
    [
        _by_autograd,
        _by_autograd_where_needed,
        lambda t, y: torch.func.grad(lambda y: y.sin().sum())(y),
        lambda t, y: torch.func.jacrev(lambda y: y.sin().sum())(y),
    ],
    ids=["autograd", "autograd where needed", "grad", "jacrev"],
)
def test_gradients_inside_the_right_hand_side_match(f):
    y0 = torch.tensor([0.5, 0.1], dtype=torch.float64)
    found = ode_coefficients(f, 0.0, y0, 5)
    torch.testing.assert_close(found, ode_coefficients(lambda t, y: y.cos(), 0.0, y0, 5))
    t = torch.tensor([0.0, 0.2], dtype=torch.float64)
    two_steps = [odeint_taylor(each, y0, t, order=6, step_size=0.1)[-1] for each in (f, lambda t, y: y.cos())]
    torch.testing.assert_close(*two_steps)
