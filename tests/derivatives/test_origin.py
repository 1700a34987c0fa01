"""Errors of user code whose messages resemble torch's: they are raised unchanged, after one call."""

import pytest
import torch
from custom_functions import custom, squared_slope
from torch.autograd import Function

import hodiff
from hodiff.derivatives.route_choice import unavailable

X = torch.ones(3)
# Phrases with which torch says that a derivative does not exist
WORDS = [
    "mode 'fast' is not supported",
    "not implemented for inputs of odd length",
    "forward mode AD of the device",
    "vmap support is planned",
    "batching rule",
    "randomness error mode",
    "Cannot mutate a captured Tensor",
]
TRANSFORMS = {
    "hvp": lambda f: hodiff.hvp(f, X, X),
    "hessian": lambda f: hodiff.hessian(f)(X),
    "hessian_matrix": lambda f: hodiff.hessian_matrix(f, X, route="forward-over-reverse"),
    "hessian_diagonal": lambda f: hodiff.hessian_diagonal(f)(X),
    "jacobian": lambda f: hodiff.jacobian(f)(X),
    "directional_derivatives": lambda f: hodiff.directional_derivatives(f, X, X, order=2),
    "HessianOperator": lambda f: hodiff.HessianOperator(f, X, check_deterministic=False) @ X,
    "JacobianOperator": lambda f: hodiff.JacobianOperator(f, X) @ X,
}


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError])
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_user_error_that_resembles_torchs_is_raised_after_one_call(transform, words, kind):
    calls = []

    def helper():
        raise kind(words)

    def f(x):
        calls.append(1)
        helper()
        return x.sum()

    with pytest.raises(kind) as caught:
        TRANSFORMS[transform](f)
    assert type(caught.value) is kind
    assert str(caught.value) == words
    assert len(calls) == 1


def error_of(f, *args):
    try:
        f(*args)
    except Exception as error:
        return error
    raise AssertionError


def backward(ctx, cotangent):
    raise NotImplementedError("no gradient")


# x², whose missing backward raises the author's own words
OnlyForward = custom("OnlyForward", lambda x: x**2, backward, squared_slope, vmap=True)


def test_errors_of_torch_and_rules_are_told_from_user_errors():
    x = X.clone().requires_grad_()
    assert unavailable(error_of(torch.autograd.grad, OnlyForward.apply(x).sum(), x))
    for f in (
        # Errors raised by an operator (without a Python frame), by torch's Python code, and by hodiff
        lambda: torch.func.hessian(lambda x: torch.nn.functional.hardsigmoid(x).sum())(X),
        lambda: torch.func.vmap(lambda x: x + torch.rand(3))(torch.ones(2, 3)),
        lambda: torch.func.grad(lambda x: Function.apply(x))(X),
    ):
        assert unavailable(error_of(f))
    assert not unavailable(error_of(lambda: torch.ones(2) + torch.ones(3)))


def test_missing_rule_falls_back_to_the_next_route():
    assert torch.equal(hodiff.jacobian(OnlyForward.apply)(X), 2 * torch.eye(3))
