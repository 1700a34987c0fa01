"""Tests of recorded gradients against closed forms, and of which transforms may differentiate them."""

import pytest
import torch
from custom_functions import old_style
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from hodiff.recompute.recording import Recording

X = torch.tensor([1.0, 2.0], dtype=torch.float64)
V = torch.tensor([0.5, -1.0], dtype=torch.float64)


def cubes(operands):
    (x,) = operands
    return (x**3).sum()


def test_gradient_and_product_match_closed_form():
    recording = Recording(cubes, [X])
    (gradient,) = recording.gradients([recording.result], graph=True)
    (product,) = torch.autograd.grad(gradient, recording.operands, V)
    torch.testing.assert_close(gradient, 3 * X**2)
    torch.testing.assert_close(product, 6 * X * V)


def test_one_of_several_outputs_may_be_constant():
    recording = Recording(lambda operands: (operands[0] ** 2, X, operands[1]), [X, V, X])
    gradients = recording.gradients(recording.result, [V, V, X])
    torch.testing.assert_close(gradients[0], 2 * X * V)
    torch.testing.assert_close(gradients[1], X)
    assert gradients[2] is None


def test_constants_have_no_gradient():
    recording = Recording(lambda operands: X.sum(), [X])
    assert recording.gradients([recording.result]) == (None,)


def test_closed_over_point_is_another_tensor_than_the_operand():
    x = X.clone().requires_grad_()
    recording = Recording(lambda operands: (operands[0] * x).sum(), [x])
    (gradient,) = recording.gradients([recording.result])
    torch.testing.assert_close(gradient, X)
    (again,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(again, torch.ones_like(X))


@pytest.mark.parametrize("who", ["the point", "another argument"])
def test_connected_if_an_argument_requires_grad(who):
    moving = X.clone().requires_grad_()
    point, others = ([moving], ()) if who == "the point" else ([X], [moving])
    assert Recording(cubes, point, others).connected
    with torch.no_grad():
        assert not Recording(cubes, point, others).connected


def test_connected_if_a_closed_over_tensor_requires_grad():
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    recording = Recording(lambda operands: w * cubes(operands), [X])
    assert not recording.connected
    assert recording.inspect(recording.result) is None
    assert recording.connected
    (gradient,) = recording.gradients([recording.result])
    torch.testing.assert_close(torch.autograd.grad(gradient.sum(), w)[0], (3 * X**2).sum())


Doubled = old_style("Doubled", lambda x: (2 * x,), once_differentiable(lambda ctx, g: 2 * g))


def test_graph_of_the_point_is_not_inspected():
    x = Doubled.apply(X.clone().requires_grad_())
    with torch.no_grad():
        recording = Recording(cubes, [x])
    assert recording.inspect(recording.result) is None
    recording = Recording(lambda operands: cubes([Doubled.apply(*operands)]), [X])
    assert recording.inspect(recording.result) == "Doubled.backward is marked once_differentiable"


def test_unconnected_gradients_require_no_grad():
    recording = Recording(cubes, [X])
    recording.inspect(recording.result)
    assert not recording.gradients([recording.result])[0].requires_grad


def test_dual_number_keeps_its_tangent():
    with forward_ad.dual_level():
        recording = Recording(cubes, [forward_ad.make_dual(X, V)])
        (gradient,) = recording.gradients([recording.result], graph=True)
        torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, 6 * X * V)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_tensor_subclasses_keep_their_graph_in_every_grad_mode(mode):
    with mode():
        recording = Recording(cubes, [X.as_subclass(Subclass)])
        (gradient,) = recording.gradients([recording.result], graph=True)
    (product,) = torch.autograd.grad(gradient, recording.operands, V)
    torch.testing.assert_close(product.as_subclass(torch.Tensor), 6 * X * V)
