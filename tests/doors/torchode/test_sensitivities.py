"""Second derivatives through torchode: right by its steps, refused by its adjoints."""

import pytest
import torch
import torchode
from doors.pages import run_example

import hodiff

D = torch.float64
RATE = torch.tensor(1.3, dtype=D)
START = torch.tensor([0.5, -1.2], dtype=D)
V = torch.tensor([1.0, 0.3], dtype=D)
END = 0.5
# The control of steps divides by the norm of an error that may be 0. Its derivatives are discarded with the option.
kinks = pytest.mark.filterwarnings("ignore:maximum:hodiff.HodiffWarning")


class Field(torch.nn.Module):
    """y' = k y^2, with the solution y0 / (1 - k t y0)."""

    def __init__(self):
        super().__init__()
        self.k = torch.nn.Parameter(RATE.clone())

    def forward(self, t, y):
        return self.k * y**2


def steps(field, **options):
    term = torchode.ODETerm(field)
    controller = torchode.IntegralController(atol=1e-11, rtol=1e-9, term=term)
    return torchode.AutoDiffAdjoint(torchode.Tsit5(term=term), controller, **options)


def adjoint(field, kind):
    term = torchode.ODETerm(field)
    controller = torchode.IntegralController(atol=1e-11, rtol=1e-9, term=term)
    return kind(term, torchode.Tsit5(term=term), controller)


def end(solver, start):
    times = torch.tensor([0.0, END], dtype=D).expand(len(start), 2)
    return solver.solve(torchode.InitialValueProblem(y0=start[:, None], t_eval=times)).ys[:, -1, 0]


def exact(start, k):
    return start / (1 - k * END * start)


@kinks
@pytest.mark.parametrize("route", ["auto", *hodiff.ROUTES])
def test_second_derivatives_in_the_start(route):
    solver = steps(Field(), backprop_through_step_size_control=False)
    found = hodiff.hvp(lambda y: end(solver, y).sum(), START, V, route=route)
    truth = 2 * RATE * END / (1 - RATE * END * START) ** 3 * V
    torch.testing.assert_close(found.detach(), truth, rtol=1e-6, atol=1e-7)


@kinks
def test_hessian_in_a_parameter_of_the_field():
    field = Field()
    solver = steps(field, backprop_through_step_size_control=False)

    class End(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.field = field

        def forward(self, start):
            return end(solver, start).sum()

    module = End()

    def value(both):
        return torch.func.functional_call(module, {"field.k": both[0]}, (both[1:],))

    def solution(both):
        return exact(both[1:], both[0]).sum()

    both = torch.cat([RATE[None], START])
    found, truth = hodiff.hessian(value)(both), torch.func.hessian(solution)(both)
    torch.testing.assert_close(found.detach(), truth, rtol=1e-6, atol=1e-6)


def test_step_size_control_has_no_second_derivative():
    """Torchode's default differentiates the control, too: a reason for the option that the page names."""
    with pytest.warns(hodiff.HodiffWarning, match="maximum: Got a length.*second derivatives are NaN"):
        found = hodiff.hvp(lambda y: end(steps(Field()), y).sum(), START, V)
    assert not found.isfinite().all()


@pytest.mark.parametrize("kind", [torchode.BacksolveAdjoint, torchode.JointBacksolveAdjoint])
def test_adjoints_are_refused(kind):
    solver = adjoint(Field(), kind)
    start = START.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(end(solver, start).sum(), start)
    torch.testing.assert_close(gradient, 1 / (1 - RATE * END * START) ** 2, rtol=1e-5, atol=1e-6)
    with pytest.raises(hodiff.RouteError, match=r"BacksolveFunction.*torchode\.AutoDiffAdjoint instead"):
        hodiff.hvp(lambda y: end(solver, y).sum(), START, V)


@kinks
def test_example_of_the_page():
    times = torch.tensor([0.0, 0.5], dtype=D)
    known = {"torch": torch, "torchode": torchode, "hodiff": hodiff, "y0": START, "v": V, "times": times}
    names = run_example("howto/second_derivatives_of_odes.md", "torchode.Tsit5", field=lambda t, y: y**2, **known)
    found = hodiff.hvp(names["by_torchode"], START, V)
    torch.testing.assert_close(found, V / (1 - 0.5 * START) ** 3, rtol=1e-6, atol=1e-7)
