"""Tests of reductions at infinities and ties, along dimensions, and their error messages."""

import pytest
import torch
from torch.func import grad, hessian, jacrev

from hodiff.errors import InputError
from hodiff.functions.softmax.reductions import amax, log_softmax, logsumexp, softmax

INF = float("inf")


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("x", "value", "gradient"),
    [
        (tensor(-INF, -INF), -INF, tensor(0, 0)),
        (tensor(INF, 0, 1), INF, tensor(1, 0, 0)),
        (tensor(INF, INF, 1), INF, tensor(0.5, 0.5, 0)),
        (tensor(-INF, 2), 2, tensor(0, 1)),
        (tensor(1e308, 0), 1e308, tensor(1, 0)),
    ],
)
def test_logsumexp_at_infinities_is_the_limit(x, value, gradient):
    def f(x):
        return logsumexp(x, 0)

    assert f(x).item() == value
    assert torch.equal(grad(f)(x), gradient)
    assert torch.equal(
        torch.stack([torch.func.jvp(f, (x,), (row,))[1] for row in torch.eye(len(x)).double()]), gradient
    )
    if gradient.max() in (0, 1):
        for second in (hessian(f)(x), jacrev(jacrev(f))(x), torch.func.jacfwd(torch.func.jacfwd(f))(x)):
            assert not second.any()


def test_logsumexp_of_empty_and_nan_inputs():
    assert logsumexp(torch.zeros(2, 0), 1).tolist() == [-INF, -INF]
    assert logsumexp(tensor(float("nan"), 1), 0).isnan()


@pytest.mark.parametrize("function", [logsumexp, amax])
@pytest.mark.parametrize("dim", [0, -1, (0, 1), (0, 2), (-1, 0), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_dim_and_keepdim_match_torch(function, dim, keepdim):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = getattr(torch, function.__name__)(x, dim, keepdim)
    torch.testing.assert_close(function(x, dim, keepdim), expected)
    scalar = torch.tensor(3.0)
    assert function(scalar, 0).shape == ()
    assert grad(lambda x: function(x, -1))(scalar) == 1


@pytest.mark.parametrize("dim", [(0, 1), (0, 2), (2, 1), (0, 1, 2)])
def test_softmax_over_several_dimensions_matches(dim):
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(softmax(x, dim), torch.exp(x) / torch.exp(x).sum(dim, keepdim=True))
    torch.testing.assert_close(log_softmax(x, dim), softmax(x, dim).log())


def test_logsumexp_hessian_matches_closed_form():
    x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = torch.softmax(x, 0)
    torch.testing.assert_close(hessian(lambda x: logsumexp(x, 0))(x), torch.diag(p) - torch.outer(p, p))


def test_softmax_derivatives_are_shift_invariant():
    x = tensor(-3, 0, 2)
    for f in (softmax, log_softmax):
        torch.testing.assert_close(jacrev(jacrev(lambda x: f(x, 0)))(x + 1e9), jacrev(jacrev(lambda x: f(x, 0)))(x))


def test_amax_ties_share_the_derivative_as_in_torch():
    x = tensor(3, 1, 3).requires_grad_()
    (ours,) = torch.autograd.grad(amax(x, 0), x, create_graph=True)
    (theirs,) = torch.autograd.grad(torch.amax(x, 0), x)
    assert torch.equal(ours, theirs)
    assert torch.func.jvp(lambda x: amax(x, 0), (x.detach(),), (tensor(1, 5, 2),))[1] == 1.5
    assert not ours.requires_grad  # the second derivative is absent, not a tensor of zeros


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax(torch.zeros(2, 3), 2), "softmax: dim: expected ints from -2 to 1"),
        (lambda: softmax(torch.zeros(2, 3), ()), "softmax: dim: expected an int or a tuple"),
        (lambda: logsumexp(torch.zeros(2, 3), (0, -2)), "expected each dimension once"),
        (lambda: logsumexp([1.0], 0), "logsumexp: x: expected a floating-point tensor, got list"),
        (lambda: amax(torch.zeros(2, 0), 1), "amax: x: expected elements along dimensions"),
        (lambda: log_softmax(torch.zeros(2, dtype=torch.int64), 0), "got int64"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
