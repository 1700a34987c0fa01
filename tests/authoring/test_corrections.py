"""Rules built from torch functions whose own derivatives need corrections, against elementary operators."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vjp, vmap

import hodiff

X = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
V = torch.tensor([1.0, 0.7, -0.3], dtype=torch.float64)


def norm(x):
    return F.layer_norm(x, (3,))


@hodiff.custom_jvp
def by_tangents(x):
    return norm(x)


@by_tangents.defjvp
def _push(primals, tangents):
    return jvp(norm, primals, tangents)


@hodiff.custom_vjp
def by_cotangents(x):
    return norm(x)


by_cotangents.defvjp(lambda x: (norm(x), x), lambda x, cotangent: vjp(norm, x)[1](cotangent))


def truth(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def scalar(f, batched=False):
    if batched:
        return lambda x: (vmap(f)(torch.stack([x.sin(), x.exp()])) * x).square().sum()
    return lambda x: (f(x.sin()) * x).square().sum()


def derivative_by_passes(f, modes):
    """Derivative along V by the named passes, the innermost first."""
    for mode in modes:
        f = _forward_pass(f) if mode == "forward" else _reverse_pass(f)
    return f(X)


def _forward_pass(f):
    return lambda x: jvp(f, (x,), (V,))[1]


def _reverse_pass(f):
    return lambda x: (grad(f)(x) * V).sum()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("function", [by_tangents, by_cotangents])
def test_derivatives_by_every_route_match_primitives(function, batched):
    for modes in (*product(("reverse", "forward"), repeat=2), ("reverse", "reverse", "forward")):
        with hodiff.corrected():
            found = derivative_by_passes(scalar(function, batched), modes)
        expected = derivative_by_passes(scalar(truth, batched), modes)
        torch.testing.assert_close(found, expected, msg=lambda text, m=modes: f"{m}: {text}")


@pytest.mark.parametrize("function", [by_tangents, by_cotangents])
@pytest.mark.parametrize("route", ["auto", *hodiff.ROUTES])
def test_hvp_by_every_route_matches_primitives(function, route):
    torch.testing.assert_close(hodiff.hvp(scalar(function), X, V, route=route), grad(_forward_pass(scalar(truth)))(X))


@pytest.mark.parametrize("function", [by_tangents, by_cotangents])
def test_third_derivative_through_a_recorded_hvp_matches_primitives(function):
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(hodiff.hvp(scalar(function), x, V) @ V, x)
    torch.testing.assert_close(found, grad(_forward_pass(_forward_pass(scalar(truth))))(X))
