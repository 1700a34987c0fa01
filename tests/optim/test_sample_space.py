"""ENGD and SPRING against their formulas with dense matrices, and on problems with known solutions."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import hodiff
from hodiff.optim import ENGD, SPRING

D = torch.float64


def network(inputs=2, width=5, outputs=1, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def dense_jacobian(model, values):
    """Differentiate numbers with respect to all parameters, a row at a time, by torch alone."""
    rows = []
    for value in values().reshape(-1):
        found = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
        pairs = zip(found, model.parameters(), strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]))
    return torch.stack(rows).numpy()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def in_parameters(jacobian, right, damping):
    return np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(jacobian.shape[1]), jacobian.T @ right)


def second_derivative(model, x):
    """Sum the second derivatives at points (N, d) by nested gradients."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    parts = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("points", [3, 40], ids=["fewer than parameters", "more than parameters"])
def test_steps_of_engd_match_the_equations_in_the_parameters(points):
    model, x, edge = network(), torch.rand(points, 2, dtype=D), torch.rand(4, 2, dtype=D)
    optimizer = ENGD(model, lr=0.3, damping=1e-3, momentum=0.6, line_search_fn=None)

    def residuals():
        inside = (second_derivative(model, x) - 1) / math.sqrt(points)
        return torch.cat([inside, model(edge)[:, 0] / 2])

    before = np.zeros(len(flat(model)))
    for _ in range(3):
        start, right, jacobian = flat(model), residuals().detach().numpy(), dense_jacobian(model, residuals)
        direction = 0.6 * before + in_parameters(jacobian, right - 0.6 * jacobian @ before, 1e-3)
        loss = optimizer.step((lambda p: hodiff.laplacian(lambda q: model(q)[0])(p) - 1, x), (model, edge))
        assert loss.item() == pytest.approx((right**2).sum() / 2, rel=1e-12)
        np.testing.assert_allclose(flat(model), start - 0.3 * direction, rtol=1e-9, atol=1e-11)
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        np.testing.assert_allclose(gradient, jacobian.T @ right, rtol=1e-9, atol=1e-12)
        before = direction


@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("points", [3, 40], ids=["fewer than parameters", "more than parameters"])
def test_rcond_solves_singular_equations_by_the_pseudo_inverse(points, damping):
    # Points that occur twice make the equations of samples singular, two linear layers those of parameters.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1), nn.Linear(1, 1)).double()
    x = torch.rand(points, 2, dtype=D).repeat(2, 1)
    start, right = flat(model), model(x).detach()[:, 0].numpy() / math.sqrt(len(x))
    u, s, v = np.linalg.svd(dense_jacobian(model, lambda: model(x) / math.sqrt(len(x))), full_matrices=False)
    kept = s > 1e-4 * s[0]
    assert not kept.all()
    assert not ((s > 5e-5 * s[0]) & (s < 2e-4 * s[0])).any()
    expected = v[kept].T @ (s[kept] / (s[kept] ** 2 + damping) * (u[:, kept].T @ right))
    ENGD(model, damping=damping, rcond=1e-8, line_search_fn=None).step((model, x))
    np.testing.assert_allclose(start - flat(model), expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())


def test_the_root_of_a_weight_repeats_a_term():
    model, x, edge = network(), torch.rand(6, 2, dtype=D), torch.rand(4, 2, dtype=D)
    other = copy.deepcopy(model)
    loss = ENGD(model).step((lambda p: model(p) - 1, x), (lambda p: math.sqrt(3) * model(p), edge))
    twice = ENGD(other).step((lambda p: other(p) - 1, x), *[(other, edge)] * 3)
    assert loss.item() == pytest.approx(twice.item(), rel=1e-12)
    np.testing.assert_allclose(flat(model), flat(other), rtol=1e-7, atol=1e-9)


def test_one_step_solves_a_linear_problem_with_several_residuals_a_point():
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(20, 3, dtype=D), torch.randn(20, 2, dtype=D)
    ENGD(model, damping=1e-14, chunk_size=7).step((lambda p: model(p["x"]) - p["y"], {"x": x, "y": y}))
    design = np.hstack([x.numpy(), np.ones((20, 1))])
    best = np.linalg.lstsq(design, y.numpy(), rcond=None)[0]
    np.testing.assert_allclose(model.weight.detach().numpy(), best[:3].T, rtol=1e-8)
    np.testing.assert_allclose(model.bias.detach().numpy(), best[3], rtol=1e-8)


def test_grid_takes_the_step_of_least_loss_or_none():
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.ones(1, 1, dtype=D)

    def run(start, function, lr=1.0):
        with torch.no_grad():
            model.weight.fill_(start)
        ENGD(model, lr=lr, damping=0.0).step((function, x))
        return model.weight.item()

    # Gauss-Newton steps of atan overshoot far from 0: -1 + (1 + 9) atan 3 = 9.49.
    place = run(3.0, lambda p: torch.atan(model(p)))
    full = (1 + 9) * math.atan(3.0)
    assert place == min((3.0 - full / 2**k for k in range(31)), key=lambda w: abs(math.atan(w)))
    # All steps raise the loss, as the derivative has the wrong sign.
    assert run(3.0, lambda p: 2 * model(p).detach() - model(p)) == 3.0
    assert run(3.0, lambda p: model(p), lr=4.0) == 0.0


def test_an_error_during_the_search_takes_no_step():
    model, calls = nn.Linear(1, 1).double(), []
    start = flat(model)

    def residual(p):
        calls.append(len(calls))
        if len(calls) == 4:
            raise ZeroDivisionError
        return torch.atan(model(p)) - 5

    with pytest.raises(ZeroDivisionError):
        ENGD(model, lr=3.0).step((residual, torch.ones(1, 1, dtype=D)))
    np.testing.assert_array_equal(flat(model), start)


@pytest.mark.parametrize("walkers", [6, 60], ids=["fewer than parameters", "more than parameters"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_steps_of_spring_match_the_covariance_in_the_parameters(is_complex, walkers):
    model, x = network(outputs=2), torch.randn(walkers, 2, dtype=D)
    generator = torch.Generator().manual_seed(1)
    energies = torch.randn(walkers, generator=generator, dtype=torch.complex128 if is_complex else D)
    optimizer = SPRING(model, lr=0.2, damping=1e-2, momentum=0.7, norm_constraint=None)

    def log_psi(p):
        return torch.complex(*model(p).unbind(-1)) if is_complex else model(p).sum(-1)

    before = np.zeros(len(flat(model)))
    for _ in range(2):
        start, values = flat(model), (lambda: torch.view_as_real(log_psi(x)) if is_complex else log_psi(x))
        rows = dense_jacobian(model, values).reshape(walkers, -1, len(start))
        rows = rows[:, 0] + 1j * rows[:, 1] if is_complex else rows[:, 0]
        rows, noise = rows - rows.mean(0), (energies - energies.mean()).numpy()
        metric = (rows.conj().T @ rows).real / walkers
        force = (rows.conj().T @ noise).real / walkers
        moved = 0.7 * before
        direction = moved + np.linalg.solve(metric + 1e-2 * np.eye(len(start)), force - metric @ moved)
        found = optimizer.step(log_psi, x, energies)
        assert found.item() == pytest.approx(energies.mean().real.item())
        np.testing.assert_allclose(flat(model), start - 0.2 * direction, rtol=1e-9, atol=1e-11)
        before = direction


def test_norm_constraint_bounds_the_step():
    model, x = network(), torch.randn(8, 2, dtype=D)
    start = flat(model)
    SPRING(model, lr=5.0, norm_constraint=1e-4).step(lambda p: model(p)[0], x, torch.randn(8, dtype=D) * 100)
    assert np.linalg.norm(flat(model) - start) == pytest.approx(1e-2)


def test_frozen_parameters_stay_and_shared_ones_count_once():
    shared = nn.Linear(2, 2).double()
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(2, 1).double())
    frozen, x = model[3].bias.detach().clone(), torch.randn(4, 2, dtype=D)
    start, jacobian = flat(model), dense_jacobian(model, lambda: model(x) / 2)
    model[3].bias.requires_grad_(False)
    right = model(x).detach()[:, 0].numpy() / 2
    ENGD(model, damping=1e-3, line_search_fn=None).step((model, x))
    assert torch.equal(model[3].bias, frozen)
    # The frozen bias is the last number.
    np.testing.assert_allclose(flat(model)[:-1], (start[:-1] - in_parameters(jacobian[:, :-1], right, 1e-3)), rtol=1e-8)


def test_copies_and_checkpoints_continue_equally():
    def run(optimizer, model, steps, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x = torch.randn(6, 2, generator=generator, dtype=D)
            optimizer.step(lambda p: model(p)[0], x, torch.randn(6, generator=generator, dtype=D))
        return flat(model)

    model = network()
    optimizer = SPRING(model, momentum=0.9)
    run(optimizer, model, 2, 0)
    copied = copy.deepcopy(optimizer)
    pickled = pickle.loads(pickle.dumps(optimizer))
    other = copy.deepcopy(model)
    loaded = SPRING(other, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found = run(optimizer, model, 3, 1)
    for each in (copied, pickled):
        np.testing.assert_array_equal(run(each, each.module, 3, 1), found)
    np.testing.assert_array_equal(run(loaded, other, 3, 1), found)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_checkpoints_from_before_rcond_load():
    model = network()
    optimizer = ENGD(model)
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["rcond"]
    optimizer.load_state_dict(state)
    assert optimizer.step((model, torch.rand(4, 2, dtype=D))).isfinite()


LINEAR = nn.Linear(2, 1).double()
POINTS = torch.ones(3, 2, dtype=D)


@pytest.mark.parametrize(
    ("make", "step", "match"),
    [
        (
            lambda: ENGD(LINEAR.parameters()),
            None,
            r"ENGD: model: expected a torch\.nn\.Module.* make an unknown coefficient a",
        ),
        (lambda: ENGD(LINEAR, line_search_fn="backtracking"), None, "ENGD: line_search_fn: expected"),
        (lambda: ENGD(LINEAR, damping=-1.0), None, "ENGD: damping: expected"),
        (lambda: ENGD(LINEAR, rcond=1.0), None, "ENGD: rcond: expected a number below 1"),
        (lambda: ENGD(LINEAR, rcond="1e-13"), None, "ENGD: rcond: expected"),
        (
            lambda: ENGD(LINEAR, rcond=1e-13),
            ((lambda p: 1e200 * (LINEAR(p) - LINEAR(p).detach()), POINTS),),
            "ENGD: step: expected finite products of derivatives",
        ),
        (lambda: SPRING(LINEAR, norm_constraint=0.0), None, "SPRING: norm_constraint: expected"),
        (lambda: SPRING(LINEAR, chunk_size=0), None, "SPRING: chunk_size: expected"),
        (lambda: SPRING(LINEAR, momentum=1.0), None, "SPRING: momentum: expected a number below 1"),
        (lambda: ENGD(LINEAR), (), r"ENGD: step: expected pairs \(function, points\), got None"),
        (lambda: ENGD(LINEAR), (LINEAR,), r"ENGD: step: expected pairs"),
        (lambda: ENGD(LINEAR), ((LINEAR, torch.ones(())),), "ENGD: step: samples: expected tensors"),
        (lambda: ENGD(LINEAR), ((LINEAR, [POINTS, POINTS[:2]]),), "ENGD: step: samples: expected tensors"),
        (lambda: ENGD(LINEAR), ((lambda p: 1.0, POINTS),), "expected a function of one sample that returns a floating"),
        (lambda: ENGD(LINEAR), ((LINEAR, POINTS), (lambda p: LINEAR(p)[:0], POINTS)), "returns at least one number"),
        (lambda: ENGD(LINEAR), ((lambda p: LINEAR(p) / 0, POINTS),), "ENGD: step: expected finite values"),
        (
            lambda: ENGD(LINEAR),
            ((lambda p: p.sum(), POINTS),),
            "expected functions that depend on the model's parameters",
        ),
        (
            lambda: ENGD(LINEAR),
            ((lambda p: LINEAR(p).detach(), POINTS),),
            "expected functions that depend on the model",
        ),
        (lambda: SPRING(LINEAR), (LINEAR, POINTS, torch.ones(4)), r"SPRING: step: energies: expected .* shape \(3,\)"),
        (lambda: SPRING(LINEAR), (lambda p: p.repeat(2), POINTS, torch.ones(3)), "log_psi: expected a function of one"),
    ],
)
def test_wrong_arguments_change_nothing(make, step, match):
    start = flat(LINEAR)
    with pytest.raises(hodiff.InputError, match=match):
        make().step(*step)
    np.testing.assert_array_equal(flat(LINEAR), start)


def test_singular_equations_name_the_damping():
    model = network()
    remedies = r"increase it, or set rcond, the cutoff of a pseudo-inverse\."
    with pytest.raises(hodiff.InputError, match=f"ENGD: damping: expected damping with which .* got 0.0; {remedies}$"):
        ENGD(model, damping=0.0).step((model, torch.ones(3, 2, dtype=D)))
    ENGD(model, damping=0.0, rcond=1e-8).step((model, torch.ones(3, 2, dtype=D)))
    model = model.float()
    with pytest.raises(hodiff.InputError, match=r"pseudo-inverse, or use a model in float64\.$"):
        ENGD(model, damping=0.0).step((model, torch.ones(3, 2)))


def test_a_coefficient_in_a_module_around_the_network_is_found():
    """The rate of y' = -0.7 y, as a parameter beside those of the network."""
    module = nn.Module()
    module.net, module.rate = network(inputs=1), nn.Parameter(torch.zeros((), dtype=D))
    times = torch.linspace(0, 1, 12, dtype=D)[:, None]
    optimizer = ENGD(module, damping=1e-6)
    for _ in range(25):
        optimizer.step(
            (lambda t: hodiff.partial(module.net, (0,))(t) + module.rate * module.net(t), times),
            (lambda t: module.net(t) - torch.exp(-0.7 * t), times),
        )
    assert abs(module.rate.item() - 0.7) < 1e-3


def test_random_functions_are_refused():
    start = flat(LINEAR)
    with pytest.raises(hodiff.InputError, match=r"ENGD: step: function: .* without random numbers"):
        ENGD(LINEAR).step((lambda p: nn.functional.dropout(LINEAR(p)), POINTS))
    np.testing.assert_array_equal(flat(LINEAR), start)
