"""Gradients with `is_grads_batched=True` and `vectorize=True` of torch.autograd, through hodiff's Functions."""

import pytest
import torch
from drawing import draw

import hodiff
from hodiff.implicit import newton, odeint, root

D = torch.float64
N, TIMES = 4, torch.tensor([0.0, 0.3], dtype=D)
WEIGHT = draw(N, N, seed=1)


@hodiff.custom_jvp
def own_jvp(x):
    return x.sin() * x


@own_jvp.defjvp
def _tangent(primals, tangents):
    (x,), (v,) = primals, tangents
    return own_jvp(x), (x.cos() * x + x.sin()) * v


def solution(memory):
    return lambda x: odeint(lambda t, y: (WEIGHT @ y).tanh(), x, TIMES, memory=memory, rtol=1e-10, atol=1e-10)[-1]


def attended(x):
    q = x.reshape(1, 1, N, 1)
    return hodiff.functions.attention(q, q.sin(), q).flatten()


def normalized(x):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()


def recomputed(x):
    return (WEIGHT @ x).tanh() * x


def distances(x):
    return (x.view(2, 1, 2) - x.view(1, 2, 2).cos()).square().sum(-1).sqrt().flatten()


# Functions with hodiff's rules, and the same functions of torch's operators.
CASES = {
    "layer_norm": (lambda x: hodiff.functions.layer_norm(x, (N,)), normalized),
    "attention": (attended, lambda x: torch.softmax(torch.outer(x, x.sin()), 1) @ x),
    "cdist": (hodiff.corrected()(lambda x: torch.cdist(x.view(2, 2), x.view(2, 2).cos()).flatten()), distances),
    "checkpoint": (lambda x: hodiff.functions.checkpoint(recomputed, x), recomputed),
    "custom_jvp": (own_jvp, lambda x: x.sin() * x),
    "root": (
        lambda x: root(lambda y, x: y**3 + y - x, newton())(torch.zeros(N, dtype=D), x),
        lambda x: 2 / 3**0.5 * torch.sinh(torch.asinh(3 * 3**0.5 / 2 * x) / 3),  # Cardano's formula
    ),
    "odeint, adjoint": (solution("adjoint"), solution("steps")),
    "odeint, checkpoints": (solution("checkpoints"), solution("steps")),
}
every = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "odeint, adjoint" else []) for name in CASES]
)
strategies = pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])


def jacobian(f, x):
    return torch.stack([torch.autograd.grad(each, x, create_graph=True)[0] for each in f(x)])


def close(name, found, expected):
    tolerance = 1e-6 if name in ("odeint, adjoint", "root") else 1e-11
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@every
def test_batched_gradients_are_differentiated_again(name):
    f, plain = CASES[name]
    x = draw(N).requires_grad_()
    expected = jacobian(plain, x)
    (found,) = torch.autograd.grad(f(x), x, torch.eye(N, dtype=D), is_grads_batched=True, create_graph=True)
    close(name, found, expected)
    second = [torch.autograd.grad(each.pow(3).sum(), x)[0] for each in (found, expected)]
    close(name, *second)


@every
@strategies
def test_vectorized_jacobians_match(name, strategy):
    f, plain = CASES[name]
    x = draw(N)
    found = torch.autograd.functional.jacobian(f, x, vectorize=True, strategy=strategy)
    close(name, found, jacobian(plain, x.requires_grad_()).detach())


@every
@strategies
def test_vectorized_hessians_match(name, strategy):
    f, plain = CASES[name]
    x = draw(N)
    found = torch.autograd.functional.hessian(
        lambda x: f(x).pow(3).sum(), x, vectorize=True, outer_jacobian_strategy=strategy
    )
    close(name, found, torch.autograd.functional.hessian(lambda x: plain(x).pow(3).sum(), x))
