"""Tests of layerwise Gauss-Newton steps, and of line searches, against matrices by hand."""

from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hodiff.optim import KFAC, HessianFree, LayerwiseGaussNewton, NewtonCG
from hodiff.optim.inner_products import InnerProduct
from hodiff.optim.local_models import GaussNewtonModel
from hodiff.optim.solvers.truncated_newton import iterates

D = torch.float64
RNG = np.random.default_rng(0)
EXACT = {"cg_iterations": 200, "cg_tolerance": 1e-12, "line_search_fn": None}


def step_of(optimizer, parameters, closure):
    before = [p.detach().clone() for p in parameters]
    optimizer.step(closure)
    return [p.detach() - b for b, p in zip(before, parameters, strict=True)]


def test_layerwise_steps_solve_each_layer_with_its_bias():
    # The model is tanh(x W^T + b) c with squared error; Jacobians are by hand.
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)).double()
    x, y = RNG.standard_normal((10, 3)), RNG.standard_normal((10, 1))
    w, b, c = (p.detach().numpy() for p in model.parameters())
    hidden = np.tanh(x @ w.T + b)
    slopes = (1 - hidden**2) * c
    first = np.concatenate([(slopes[:, :, None] * x[:, None, :]).reshape(10, -1), slopes], 1)
    excess = (hidden @ c.T - y)[:, 0] * 2 / 10
    solved = [
        np.linalg.solve(2 / 10 * jac.T @ jac + 0.07 * np.eye(jac.shape[1]), jac.T @ excess + 0.02 * place)
        for jac, place in [(first, np.concatenate([w.reshape(-1), b])), (hidden, c[0])]
    ]
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    optimizer = LayerwiseGaussNewton(model.named_parameters(), 0.5, 0.05, 0.02, **EXACT)
    ours = step_of(
        optimizer, list(model.parameters()), lambda: (model(inputs), lambda outputs: F.mse_loss(outputs, targets))
    )
    expected = [-0.5 * solved[0][:6], -0.5 * solved[0][6:], -0.5 * solved[1]]
    for our, true in zip(ours, expected, strict=True):
        np.testing.assert_allclose(our.numpy().reshape(-1), true, rtol=1e-8)


def test_layerwise_steps_of_deep_linear_networks_match_kfac():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)).double()
    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)).double()
    other.load_state_dict(model.state_dict())
    x, y = torch.randn(20, 3, dtype=D), torch.randn(20, 4, dtype=D)
    ours = step_of(
        LayerwiseGaussNewton(model.named_parameters(), damping=0.0, **EXACT),
        list(model.parameters()),
        lambda: (model(x), lambda z: F.mse_loss(z, y)),
    )
    kfac = KFAC(other.parameters(), 1.0, 0.0, 0.0, kl_clip=None, fisher="exact")
    theirs = step_of(kfac, list(other.parameters()), lambda: F.mse_loss(other(x), y))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_layers_are_grouped_by_name_or_parameter_group():
    def sizes(params):
        return [len(layer) for layer in LayerwiseGaussNewton(params)._layers()]

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)))
    assert sizes(model.named_parameters()) == [2, 2, 1]
    assert sizes(model.parameters()) == [1] * 5
    named = list(model.named_parameters())
    assert sizes([{"params": named[::2]}, {"params": named[1::2], "lr": 0.1}]) == [2, 2, 1]


@pytest.mark.parametrize("maximize", [False, True])
def test_backtracking_halves_until_sufficient_decrease(maximize):
    # Newton's step for log cosh overshoots from 1.5 on: it goes to x - sinh(2 x) / 2.
    sign = -1.0 if maximize else 1.0
    x, rates, decay = 2.0, 1.5, 0.01
    w = torch.tensor([x], dtype=D, requires_grad=True)
    optimizer = NewtonCG([w], rates, weight_decay=decay, line_search_fn="backtracking", maximize=maximize)

    def value(at):
        return np.log(np.cosh(at)) + 0.5 * decay * at**2

    shortened = 0
    for _ in range(4):
        slope, curvature = np.tanh(x) + decay * x, 1 / np.cosh(x) ** 2 + decay
        step, halvings = -rates * slope / curvature, 0
        while value(x + step / 2**halvings) > value(x) + 1e-4 * slope * step / 2**halvings:
            halvings += 1
        shortened += halvings > 0
        x += step / 2**halvings
        optimizer.step(lambda: sign * w.cosh().log().sum())
        np.testing.assert_allclose(w.item(), x, rtol=1e-9)
    assert 0 < shortened < 4


def test_backtracking_repeats_random_numbers_and_keeps_buffers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    x, y = torch.randn(16, 3, dtype=D), torch.randint(2, (16,))
    optimizer = NewtonCG(
        model.parameters(), 4.0, 0.01, curvature="gauss-newton", cg_iterations=5, line_search_fn="backtracking"
    )
    calls = []

    def closure():
        outputs = model(x)
        calls.append(torch.get_rng_state())
        return outputs, lambda z: F.cross_entropy(z, y)

    for _ in range(4):
        calls.clear()
        optimizer.step(closure)
        assert len(calls) >= 2
        assert all(torch.equal(state, calls[0]) for state in calls)
    assert model[1].num_batches_tracked == 4


def test_step_without_descent_leaves_parameters():
    w = torch.tensor([1.0, -2.0], dtype=D, requires_grad=True)
    optimizer = NewtonCG([w], line_search_fn="backtracking")
    values = iter([0.0] + [1.0] * 100)
    optimizer.step(lambda: (w**2).sum() * 0 + next(values) + (w - w.detach()).sum())
    assert w.tolist() == [1.0, -2.0]


def test_preconditioned_conjugate_gradients_match_the_scaled_system():
    A = RNG.standard_normal((4, 4))
    A, b, m = A @ A.T + np.eye(4), RNG.standard_normal(4), np.array([1.0, 3.0, 0.2, 8.0])
    # Plain iterates for the system scaled from both sides, as textbooks derive them.
    root = np.sqrt(m)
    scaled = torch.from_numpy(A / np.outer(root, root))
    plain = iterates(lambda v: scaled @ v, torch.from_numpy(b / root), InnerProduct())
    matrix, right = torch.from_numpy(A), torch.from_numpy(b)
    ours = iterates(lambda v: matrix @ v, right, InnerProduct(), preconditioner=torch.from_numpy(m))
    for our, each in islice(zip(ours, plain, strict=False), 4):
        np.testing.assert_allclose(our.x.numpy(), each.x.numpy() / root, rtol=1e-9)
        np.testing.assert_allclose(our.residual, np.linalg.norm(b - A @ our.x.numpy()), rtol=1e-6)
        np.testing.assert_allclose(our.value, each.value, rtol=1e-9)


def test_squared_example_gradients_match():
    x, y = RNG.standard_normal((6, 3)), RNG.standard_normal((6, 2))
    w = torch.randn(2, 3, dtype=D, requires_grad=True)
    excess = (x @ w.detach().numpy().T - y) * 2 / y.size
    true = 6 * ((excess[:, :, None] * x[:, None, :]) ** 2).sum(0).reshape(-1)
    targets = torch.from_numpy(y)
    model = GaussNewtonModel("test", [w], (torch.from_numpy(x) @ w.T, lambda z: F.mse_loss(z, targets)))
    drawn, unit = model.squared_gradients(1500, torch.Generator().manual_seed(0), 0.0)
    drawn = drawn * unit**2
    np.testing.assert_allclose(drawn, true, rtol=0.15)


def test_preconditioned_hessian_free_takes_fewer_products():
    torch.manual_seed(0)
    scales = torch.logspace(-2, 2, 12, dtype=D)
    x = torch.randn(40, 12, dtype=D) * scales
    y = x @ (torch.randn(12, dtype=D) / scales) + torch.randn(40, dtype=D)
    expected = np.linalg.solve(2 / 40 * (x.T @ x).numpy() + 1e-4 * np.eye(12), 2 / 40 * (x.T @ y).numpy())
    counts = []
    for preconditioner in (None, "empirical-fisher"):
        w = torch.zeros(12, dtype=D, requires_grad=True)
        optimizer = HessianFree([w], damping=1e-4, preconditioner=preconditioner)
        optimizer.step(lambda w=w: (x @ w, lambda z: ((z - y) ** 2).mean()))
        np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-4)
        counts.append(optimizer.last.cg_iterations)
    assert counts[1] < 0.6 * counts[0]
