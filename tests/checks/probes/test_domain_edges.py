"""Gradients at edges of the domain, at infinity and for large arguments, against limits in closed form."""

import pytest
import torch
import torch.nn.functional as F

from hodiff.checks import check
from hodiff.checks.probes.domain_edges import bad_gradient, domain_edges, large_arguments

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)
M = torch.tensor([[0.5, -1.2, 2.0], [0.3, 0.9, -0.6]], dtype=torch.float64)


def gaussian(x):
    return torch.exp(-(x**2))


@pytest.mark.parametrize("f", [torch.tanh, torch.sigmoid, F.softplus, F.logsigmoid, torch.atan, torch.erf, torch.exp])
def test_finite_limits_at_infinity_are_no_defect(f):
    assert domain_edges(lambda x: (f(x),), (X,), "") == []


@pytest.mark.parametrize("f", [torch.sin, torch.square, lambda x: x, F.silu, lambda x: x.softmax(0), torch.abs])
def test_functions_without_limit_at_infinity_are_no_defect(f):
    assert domain_edges(lambda x: (f(x),), (X,), "") == []


def test_nan_gradient_at_infinity_is_a_warning():
    (cause,) = domain_edges(lambda x: (gaussian(x),), (X,), "here")
    assert (cause.code, cause.severity, cause.location) == ("HD112", "warning", "here")
    assert "an element of input 0 is inf" in cause.evidence[0]
    assert domain_edges(lambda x: (gaussian(x),), (X,), "", infinite=False) == []


def test_value_that_is_not_the_limit_is_no_defect():
    """The value 0 at infinity is no limit of the identity, so its derivative there may be anything."""
    f = lambda x: (torch.where(x.isinf(), 0.0, x) + 0 * gaussian(x),)  # noqa: E731
    point = torch.tensor([torch.inf, 1.0], dtype=torch.float64)
    assert torch.autograd.functional.jacobian(lambda x: f(x)[0].sum(), point)[0].isnan()
    assert bad_gradient(f, (point,)) == ""
    assert bad_gradient(lambda x: (gaussian(x),), (point,)) != ""


def test_gradients_of_finite_inputs_beside_infinity_are_no_defect():
    """The gradient of a weight is 0 * inf where the input is infinite, in every layer; that is no defect."""
    f = lambda x, w: ((x * w).tanh(),)  # noqa: E731
    gradients = torch.autograd.grad(f(torch.tensor(torch.inf), w := torch.ones((), requires_grad=True))[0], w)
    assert gradients[0].isnan()
    assert domain_edges(f, (X, X.flip(0)), "") == []


def test_overflow_is_reported_instead_of_infinity():
    report = check(lambda x: 1 / (1 + torch.exp(-x)), X, scipy=False)
    assert report.codes == ("HD111",)


def test_overflow_at_large_arguments_is_found():
    assert large_arguments(lambda x: (torch.nn.functional.logsigmoid(x),), (X,), "") == []
    (cause,) = large_arguments(lambda x: (torch.log(torch.sigmoid(x)),), (X,), "here")
    assert (cause.code, cause.location) == ("HD111", "here")


def test_wrong_gradient_at_zero_is_found():
    assert domain_edges(lambda x: (x.abs().sqrt(),), (X,), "") == []
    (cause,) = domain_edges(lambda x: (torch.where(x > 0, x * x.log(), 0.0) * x,), (X,), "")
    assert "an element of input 0 is 0" in cause.evidence[0]
