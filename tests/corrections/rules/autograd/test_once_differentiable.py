"""Second derivatives through once_differentiable raise instead of returning zero; other derivatives do not raise."""

import pytest
import torch
from custom_functions import Cube, Square

import hodiff


def cube(x):
    return Cube.apply(x).sum()


def square(x):
    return Square.apply(x).sum()


def new_leaf():
    return torch.tensor([1.0, 2.0], requires_grad=True)


def test_torch_alone_returns_zero():
    """The true second derivative is 6 x; the tests below would prove nothing if torch alone were right."""
    product = torch.func.grad(lambda x: torch.func.grad(cube)(x).sum())(new_leaf().detach())
    assert torch.equal(product, torch.zeros(2))


def test_recorded_second_derivative_is_rejected():
    with hodiff.corrected():
        leaf = new_leaf()
        with pytest.raises(hodiff.RouteError, match=r"Cube\.backward is marked once_differentiable"):
            torch.autograd.grad(cube(leaf), leaf, create_graph=True)
        with pytest.raises(hodiff.RouteError, match=r"Cube\.backward is marked once_differentiable"):
            torch.autograd.grad([cube(leaf)], [leaf], None, None, True)
        with pytest.raises(hodiff.RouteError, match=r"Cube\.backward is marked once_differentiable"):
            cube(leaf).backward(create_graph=True)


def test_first_derivatives_are_allowed():
    with hodiff.corrected():
        leaf = new_leaf()
        (gradient,) = torch.autograd.grad(cube(leaf), leaf)
        cube(leaf).backward()
        assert torch.equal(gradient, leaf.grad)
        assert torch.equal(torch.func.grad(cube)(leaf.detach()), gradient)
        assert torch.equal(torch.func.vmap(torch.func.grad(lambda x: Cube.apply(x)))(leaf.detach()), gradient)
        assert torch.equal(torch.func.vjp(cube, leaf.detach())[1](torch.tensor(1.0))[0], gradient)
        edge = torch.autograd.graph.get_gradient_edge(leaf)
        assert torch.equal(torch.autograd.grad(cube(leaf), edge)[0], gradient)


@pytest.mark.parametrize(
    "second",
    [
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()),
        lambda f: lambda x: torch.func.jvp(torch.func.grad(f), (x,), (torch.ones(2),))[1],
        lambda f: lambda x: torch.func.vjp(torch.func.grad(f), x)[1](torch.ones(2))[0],
        lambda f: lambda x: torch.func.jacrev(torch.func.jacrev(f))(x).sum(0),
    ],
    ids=["grad of grad", "jvp of grad", "vjp of grad", "jacrev of jacrev"],
)
def test_nested_transforms_are_rejected(second):
    point = new_leaf().detach()
    with hodiff.corrected():
        assert torch.equal(second(square)(point), 2 * torch.ones(2))
        with pytest.raises(hodiff.RouteError, match=r"Cube\.backward is marked once_differentiable"):
            second(cube)(point)


def test_gradient_penalty_of_right_functions_is_allowed():
    with hodiff.corrected():
        leaf = new_leaf()
        (gradient,) = torch.autograd.grad(square(leaf), leaf, create_graph=True)
        gradient.square().sum().backward()
    assert torch.equal(leaf.grad, 8 * leaf.detach())
