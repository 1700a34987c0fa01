"""hodiff's derivatives and optimizers inside PINA: equal residuals, and training by PINA's Trainer."""

import pytest
import torch
from doors.pages import run_example
from doors.pina.problems import PROBLEMS, error, inverse_heat, made
from pina import LabelTensor, Trainer
from pina.model import FeedForward, KolmogorovArnoldNetwork
from pina.optim import TorchOptimizer
from pina.solver import PhysicsInformedSingleModelSolver

import hodiff
from hodiff.doors.pina import laplacian, partial

QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def trained(problem, model, epochs, **options):
    solver = PhysicsInformedSingleModelSolver(
        problem, model, optimizer=TorchOptimizer(hodiff.optim.SSBroyden, **options)
    )
    Trainer(solver, max_epochs=epochs, enable_model_summary=False, shuffle=False, **QUIET).train()
    return solver


def evaluated(name, by_hodiff):
    """Return the residual at the points, and the gradient of its mean square."""
    problem, model = made(name, by_hodiff=by_hodiff)
    points = problem.discretised_domains["D"].clone().requires_grad_()
    # PINA passes these coordinates to the model in the order of `input_variables`.
    values = PhysicsInformedSingleModelSolver(problem, model)(points)
    residual = problem.conditions["D"].equation.residual(points, values)
    residual = residual.tensor if isinstance(residual, LabelTensor) else residual
    gradient = torch.autograd.grad(residual.square().mean(), list(model.parameters()), allow_unused=True)
    return residual.detach(), torch.cat([g.reshape(-1) for g in gradient if g is not None])


@pytest.mark.parametrize("name", PROBLEMS)
def test_residuals_and_gradients_are_pina_s(name):
    for one, other in zip(evaluated(name, True), evaluated(name, False), strict=True):
        assert one.shape == other.shape
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12 * other.abs().max().item())


@pytest.mark.parametrize("name", ["Poisson", "heat"])
@pytest.mark.slow
def test_broyden_in_their_trainer_solves_the_equation(name):
    problem, model = made(name, by_hodiff=True)
    solver = PhysicsInformedSingleModelSolver(problem, model)
    before = error(problem, solver)
    solver = trained(problem, model, 20, max_iter=20)
    assert error(problem, solver) < 2e-3 < before


def test_their_trainer_takes_the_iterations_of_minimize():
    problem, model = made("Poisson", by_hodiff=True)
    trained(problem, model, 3, max_iter=2)
    _, again = made("Poisson", by_hodiff=True)
    inside, edge = (problem.discretised_domains[name].tensor for name in ("D", "boundary"))
    x, y = torch.pi * inside.T

    def loss(weights):
        def network(points):
            return torch.func.functional_call(again, weights, (points,))

        residual = hodiff.laplacian(network, batched=True)(inside)[:, 0] - 2 * torch.pi**2 * x.sin() * y.sin()
        return residual.square().mean() + network(edge).square().mean()

    start = {name: p.detach().clone() for name, p in again.named_parameters()}
    found = hodiff.optimize.minimize(loss, start, method="ssbroyden", options={"maxiter": 6})
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), found.x[name], rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_unknown_coefficients_are_found():
    """PINA passes its unknown parameters to the equation and to the optimizer."""
    torch.manual_seed(0)
    model = FeedForward(2, 1, layers=[12, 12], func=torch.nn.Tanh)
    problem = inverse_heat(model)
    trained(problem, model, 8, max_iter=50)
    assert abs(problem.unknown_parameters["diffusivity"].item() - 0.1) < 1e-3


def test_corrected_around_train_repairs_their_derivatives_of_layer_norm():
    """Training by PINA's second-order residual of such a network follows a wrong gradient of torch."""

    class NormalizedTanh(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.LayerNorm(16), torch.nn.Tanh())

    def after_two_steps(by_hodiff):
        problem, model = made("Poisson", by_hodiff=by_hodiff, func=NormalizedTanh)
        optimizer = TorchOptimizer(torch.optim.SGD, lr=1e-4)
        solver = PhysicsInformedSingleModelSolver(problem, model, optimizer=optimizer)
        Trainer(solver, max_epochs=2, enable_model_summary=False, shuffle=False, **QUIET).train()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    expected = after_two_steps(True)
    with hodiff.corrected():
        torch.testing.assert_close(after_two_steps(False), expected, rtol=1e-9, atol=1e-11)
    assert (after_two_steps(False) - expected).abs().max() > 1e-4


def test_derivatives_by_labels():
    points = LabelTensor(torch.rand(5, 3), ["t", "y", "x"])

    def u(p):
        x, y, t = p.T
        return torch.stack([x**3 * y**2, t * x], 1)

    _, y, x = points.tensor.T
    u_xxy, u_t = partial(u, points, [("x", "y", "x"), ("t",)], ["x", "y", "t"])
    torch.testing.assert_close(u_xxy, torch.stack([12 * x * y, 0 * x], 1))
    torch.testing.assert_close(u_t, torch.stack([0 * x, x], 1))
    expected = torch.stack([6 * x * y**2 + 2 * x**3, 0 * x], 1)
    for d in (None, ["x", "y"], ["t", "y", "x"]):
        torch.testing.assert_close(laplacian(u, points, ["x", "y", "t"], d=d), expected)
    torch.testing.assert_close(laplacian(u, points, ["x", "y", "t"], d=["y"])[:, 0], 2 * x**3)


def test_kolmogorov_arnold_network_has_taylor_mode():
    torch.manual_seed(0)
    model = KolmogorovArnoldNetwork([2, 3, 1], spline_order=4, n_knots=5).double()
    points = torch.rand(4, 2, dtype=torch.float64)
    expected = torch.stack([torch.func.hessian(lambda p: model(p[None])[0, 0])(p).trace() for p in points])
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(hodiff.laplacian(model, batched=True)(points)[:, 0], expected)


def test_errors_name_the_argument():
    points = LabelTensor(torch.rand(5, 2), ["t", "x"])
    with pytest.raises(hodiff.InputError, match=r"partial: coordinates: expected labels among x, t, .* got \['z'\]"):
        partial(torch.sin, points, [("z",)], ["x", "t"])
    with pytest.raises(hodiff.InputError, match="laplacian: d: expected labels among x, t"):
        laplacian(torch.sin, points, ["x", "t"], d=[])
    with pytest.raises(hodiff.InputError, match="partial: points: expected the LabelTensor"):
        partial(torch.sin, points.tensor, [("x",)], ["x", "t"])
    with pytest.raises(
        hodiff.InputError, match=r"inputs: expected the labels of the points, .* problem\.input_variables"
    ):
        partial(torch.sin, points, [("x",)], ["x"])


@pytest.mark.slow
def test_example_of_the_page():
    names = run_example("guides/physics.md", "from pina import")
    points = names["problem"].discretised_domains["t0"]
    with torch.no_grad():
        off = names["solver"](points).tensor + torch.sin(torch.pi * points["x"].tensor)
    assert off.square().mean() < 0.02
