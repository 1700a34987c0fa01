"""Every composition of forward and reverse passes, against closed forms, and the rules that each pass calls."""

import pytest
import torch
from custom_functions import custom, squared_slope

from hodiff import InputError
from hodiff.checks import derivative, route_names
from hodiff.checks.oracles.compositions import along_directions

X = torch.tensor([0.3, -0.8, 1.2], dtype=torch.float64)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_every_route_matches_closed_form(order):
    """The derivative of f = exp(a·x) along directions d is exp(a·x) Π(a·d) a."""
    a = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    directions = torch.randn(order - 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(order))
    expected = (a @ X).exp() * (directions @ a).prod() * a
    assert len(route_names(order)) == 2**order
    for route in route_names(order):
        torch.testing.assert_close(derivative(lambda x: (a @ x).exp(), route)(X, *directions), expected)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_along_directions_matches_contracted_closed_form(order):
    directions = torch.randn(order, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(order))
    a = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    expected = (a @ X).exp() * (directions @ a).prod()
    for route in route_names(order):
        torch.testing.assert_close(along_directions(lambda x: (a @ x).exp(), route)(X, *directions), expected)


def test_each_route_calls_its_own_rules():
    """Each route calls the Function's rules in the order of its passes, the innermost first."""
    calls = []

    def slope(mode):
        return lambda ctx, vector: (calls.append(mode), squared_slope(ctx, vector))[1]

    Spy = custom("Spy", lambda x: x**2, slope("reverse"), slope("forward"))

    for route in route_names(1):
        calls.clear()
        derivative(lambda x: Spy.apply(x).sum(), route)(X)
        assert set(calls) == {route}


@pytest.mark.parametrize("order", [0, -1, 1.0, True, "2"])
def test_rejects_bad_orders(order):
    with pytest.raises(InputError, match="order: expected an int of 1 or more"):
        route_names(order)


def test_rejects_unknown_route():
    with pytest.raises(InputError, match="got 'backward'"):
        derivative(torch.sum, "backward")
