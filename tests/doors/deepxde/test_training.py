"""hodiff's derivatives and optimizers inside DeepXDE: equal residuals, and training by DeepXDE's own loop."""

import deepxde as dde
import pytest
import torch
from doors.deepxde.problems import PROBLEMS
from doors.pages import run_example

import hodiff

every = pytest.mark.parametrize("name", PROBLEMS)


def losses(model):
    """Return the terms of the loss at DeepXDE's points, with the gradient of their sum."""
    points, targets, further = model.data.train_next_batch()
    _, terms = model.outputs_losses_train(points, targets, further)
    gradient = torch.autograd.grad(terms.sum(), list(model.net.parameters()), allow_unused=True)
    return terms.detach(), torch.cat([g.reshape(-1) for g in gradient if g is not None])


@every
def test_residuals_and_gradients_are_deepxde_s(name):
    ours, theirs = (PROBLEMS[name].model(by_hodiff) for by_hodiff in (True, False))
    points = torch.as_tensor(ours.data.train_next_batch()[0]).requires_grad_()
    values = ours.net(points)
    found, expected = ours.data.pde(points, values), theirs.data.pde(points, theirs.net(points))
    dde.grad.clear()
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())
    for model in (ours, theirs):
        model.compile("adam", lr=1e-3, verbose=0)
    for one, other in zip(losses(ours), losses(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11 * other.abs().max().item())
    assert losses(ours)[1].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["Poisson", "heat"])
@pytest.mark.slow
def test_broyden_in_their_loop_solves_the_equation(name):
    problem = PROBLEMS[name]
    model = problem.model(by_hodiff=True)
    before = problem.error(model)
    model.compile(hodiff.optim.SSBroyden(model.net.parameters(), max_iter=20), verbose=0)
    history, state = model.train(iterations=25, display_every=5, verbose=0)
    assert problem.error(model) < 1e-3 < before
    assert len(history.steps) == 6
    assert state.step == 25
    assert sum(history.loss_train[-1]) < 1e-4 * sum(history.loss_train[0])


def test_their_loop_takes_the_iterations_of_minimize():
    problem = PROBLEMS["Poisson"]
    model, again = problem.model(by_hodiff=True), problem.model(by_hodiff=True)
    model.compile(hodiff.optim.SSBroyden(model.net.parameters(), max_iter=2), verbose=0)
    model.train(iterations=3, verbose=0)
    points = torch.as_tensor(again.data.train_next_batch()[0])
    edge, inside = points.split([again.data.num_bcs[0], len(points) - again.data.num_bcs[0]])
    u = again.net

    def loss(weights):
        def network(x):
            return torch.func.functional_call(u, weights, (x,))

        residual = hodiff.laplacian(network, batched=True)(inside) + torch.pi**2 * torch.sin(torch.pi * inside)
        return residual.square().mean() + (network(edge) - torch.sin(torch.pi * edge)).square().mean()

    start = {name: p.detach().clone() for name, p in u.named_parameters()}
    found = hodiff.optimize.minimize(loss, start, method="ssbroyden", options={"maxiter": 6})
    for name, p in model.net.named_parameters():
        torch.testing.assert_close(p.detach(), found.x[name], rtol=1e-7, atol=1e-9)


def test_corrected_around_train_repairs_their_derivatives_of_layer_norm():
    """Training by DeepXDE's second-order residual of such a network follows a wrong gradient of torch."""

    def after_two_steps(residual):
        dde.config.set_default_float("float64")
        torch.manual_seed(0)
        net = dde.nn.FNN([1, 8, 1], "tanh", "Glorot normal")
        net.linears[0] = torch.nn.Sequential(net.linears[0], torch.nn.LayerNorm(8, dtype=torch.float64))
        model = dde.Model(PROBLEMS["Poisson"].data(residual(net)), net)
        model.compile("sgd", lr=1e-4, verbose=0)
        model.train(iterations=2, verbose=0)
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    expected = after_two_steps(PROBLEMS["Poisson"].ours)

    def theirs(net):
        return PROBLEMS["Poisson"].theirs

    with hodiff.corrected():
        torch.testing.assert_close(after_two_steps(theirs), expected, rtol=1e-9, atol=1e-11)
    assert (after_two_steps(theirs) - expected).abs().max() > 1e-4


def test_unknown_coefficients_are_found():
    """The inverse problem: the coefficient of u_xx, from the solution at the points."""
    dde.config.set_default_float("float64")
    dde.config.set_random_seed(0)
    diffusivity = dde.Variable(1.0)
    problem = PROBLEMS["heat"]
    net = dde.nn.FNN([2, 12, 12, 1], "tanh", "Glorot normal")

    def residual(x, _):
        u_t, u_xx = hodiff.partial(net, [(1,), (0, 0)], batched=True)(x)
        return u_t - diffusivity * u_xx

    region = problem.data(residual).geom
    places = region.random_points(60)
    known = dde.icbc.PointSetBC(places, problem.exact(places))
    model = dde.Model(dde.data.TimePDE(region, residual, [known], num_domain=60, anchors=places), net)
    optimizer = hodiff.optim.SSBroyden([*net.parameters(), diffusivity], max_iter=50)
    model.compile(optimizer, external_trainable_variables=diffusivity, verbose=0)
    model.train(iterations=8, verbose=0)
    assert abs(diffusivity.item() - 0.4) < 5e-3


@pytest.mark.slow
def test_example_of_the_page():
    names = run_example("guides/physics.md", "import deepxde")
    history = names["history"]
    assert sum(history.loss_train[-1]) < 1e-3 * sum(history.loss_train[0])
