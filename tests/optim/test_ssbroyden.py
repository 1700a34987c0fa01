"""`SSBroyden` takes the iterations of `minimize(method="ssbroyden")`, whatever the closure and the groups."""

import pytest
import torch
from torch import nn

import hodiff

D = torch.float64


def problem():
    """Return a network and its regression loss, as a function of the network's parameters by name."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.linspace(-1, 1, 20, dtype=D)[:, None]

    def loss(parameters):
        return (torch.func.functional_call(net, parameters, (x,)) - x.sin() * x).square().mean()

    return net, loss


@pytest.mark.parametrize("steps", [1, 5])
def test_iterates_are_those_of_minimize(steps):
    net, loss = problem()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    theirs = hodiff.optimize.minimize(loss, start, method="ssbroyden", options={"maxiter": 20, "gtol": 0.0})
    optimizer = hodiff.optim.SSBroyden(net.parameters(), max_iter=20 // steps, tolerance_grad=0.0)
    first = loss(dict(net.named_parameters())).item()
    losses = [optimizer.step(lambda: loss(dict(net.named_parameters()))).item() for _ in range(steps)]
    assert losses[0] == pytest.approx(first)
    assert theirs.fun < 0.2 * first
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), theirs.x[name], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(p.grad, theirs.jac[name], rtol=1e-5, atol=1e-9)


def test_parameters_outside_of_the_model_and_frozen_ones():
    net, loss = problem()
    scale = torch.tensor(3.0, dtype=D, requires_grad=True)
    net[0].bias.requires_grad_(False)
    fixed = net[0].bias.clone()
    optimizer = hodiff.optim.SSBroyden(net.parameters(), max_iter=30)
    optimizer.add_param_group({"params": [scale]})
    for _ in range(3):
        optimizer.step(lambda: loss(dict(net.named_parameters())) + (scale**2 - 2) ** 2)
    assert abs(scale.item() - 2**0.5) < 1e-5
    assert torch.equal(net[0].bias, fixed)
    # The next step has another number of unknowns.
    net[0].bias.requires_grad_(True)
    before = loss(dict(net.named_parameters())).item()
    optimizer.step(lambda: loss(dict(net.named_parameters())))
    assert loss(dict(net.named_parameters())).item() < before


def test_random_numbers_repeat_within_a_step():
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(3, dtype=D))
    optimizer = hodiff.optim.SSBroyden([w], max_iter=30)
    drawn = []

    def closure():
        drawn.append(torch.rand(3, dtype=D))
        return (w - drawn[-1]).square().sum()

    optimizer.step(closure)
    assert all(torch.equal(each, drawn[0]) for each in drawn)
    torch.testing.assert_close(w.detach(), drawn[0])
    optimizer.step(closure)
    assert not torch.equal(drawn[-1], drawn[0])


def test_an_error_at_a_trial_point_changes_nothing():
    net, loss = problem()
    optimizer = hodiff.optim.SSBroyden(net.parameters(), max_iter=3)
    optimizer.step(lambda: loss(dict(net.named_parameters())))
    before = [p.detach().clone() for p in net.parameters()]
    matrix = optimizer.state[net[0].weight]["inverse_hessian"].clone()
    calls = []

    def failing():
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("stop")
        return loss(dict(net.named_parameters()))

    with pytest.raises(KeyError):
        optimizer.step(failing)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert torch.equal(matrix, optimizer.state[net[0].weight]["inverse_hessian"])


def test_refuses_nan_and_groups_of_other_rates():
    w = nn.Parameter(torch.ones(2, dtype=D))
    optimizer = hodiff.optim.SSBroyden([w])
    with pytest.raises(hodiff.InputError, match=r"SSBroyden: .*finite"):
        optimizer.step(lambda: (w * float("nan")).sum())
    with pytest.raises(hodiff.InputError, match=r"SSBroyden: lr: expected 1\.0, as in the first group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})


def test_states_of_another_size_are_refused_and_change_nothing():
    def stepped(width):
        torch.manual_seed(0)
        net, x = nn.Linear(width, 3).double(), torch.randn(9, width, dtype=D)
        optimizer = hodiff.optim.SSBroyden(net.parameters(), max_iter=2)
        optimizer.step(lambda: net(x).square().mean())
        return net, optimizer

    _, large = stepped(5)
    net, optimizer = stepped(2)
    before = optimizer.state[net.weight]["inverse_hessian"].clone()
    with pytest.raises(hodiff.InputError, match=r"SSBroyden: load_state_dict: .* shape \(18, 18\) .* needs \(9, 9\)"):
        optimizer.load_state_dict(large.state_dict())
    assert torch.equal(optimizer.state[net.weight]["inverse_hessian"], before)
    # A state also has the size of the parameters that are not frozen.
    net.bias.requires_grad_(False)
    with pytest.raises(hodiff.InputError, match=r"needs \(6, 6\)"):
        optimizer.load_state_dict(optimizer.state_dict())
    net.bias.requires_grad_()
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[net.weight]["inverse_hessian"], before)
