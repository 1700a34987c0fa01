"""Transforms in several threads, against closed forms: torch has one forward-mode level for all threads."""

import pytest
import torch
from threads import in_threads

import hodiff

W = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
V = torch.tensor([1.0, -0.5], dtype=torch.float64)
POINTS = [torch.tensor([0.1 * i, 1 - 0.2 * i], dtype=torch.float64) for i in range(5)]
TIMES = 60


def wave(x):
    return torch.sin(W @ x)


def energy(x):
    return torch.sin(W @ x).sum()


def jacobian(x):
    return torch.cos(W @ x)[:, None] * W


def hessian(x):
    return -W.mT @ (torch.sin(W @ x)[:, None] * W)


def product(x):
    return hessian(x) @ V


CASES = {
    "jacobian": (hodiff.jacobian(wave), jacobian),
    "jacobian, forward": (hodiff.jacobian(wave, mode="forward"), jacobian),
    "jacobian, reverse": (hodiff.jacobian(wave, mode="reverse"), jacobian),
    "hessian": (hodiff.hessian(energy), hessian),
    "hessian, forward-over-reverse": (hodiff.hessian(energy, route="forward-over-reverse"), hessian),
    "hessian_diagonal": (hodiff.hessian_diagonal(energy), lambda x: hessian(x).diagonal()),
    "directional_derivatives": (
        lambda x: hodiff.directional_derivatives(wave, x, V, order=2)[2],
        lambda x: -torch.sin(W @ x) * (W @ V) ** 2,
    ),
    "vmap of hvp": (
        lambda x: torch.func.vmap(lambda v: hodiff.hvp(energy, x, v, route="forward-over-reverse"))(torch.eye(2).to(x)),
        hessian,
    ),
    "HessianOperator": (lambda x: hodiff.HessianOperator(energy, x) @ V, product),
    "JacobianOperator": (lambda x: hodiff.JacobianOperator(wave, x) @ V, lambda x: jacobian(x) @ V),
    **{
        route: (lambda x, route=route: hodiff.hvp(energy, x, V, route=route), product)
        for route in ("auto", *hodiff.ROUTES)
    },
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_transforms_in_threads_match_closed_form(name):
    call, truth = CASES[name]
    for found, x in zip(in_threads(call, POINTS, TIMES), POINTS * (TIMES // 5), strict=True):
        torch.testing.assert_close(found, truth(x))


def test_different_transforms_in_threads_match_closed_form():
    """Some threads run reverse passes during forward passes of other threads."""
    jobs = [(name, x) for x in POINTS for name in CASES]
    found = in_threads(lambda job: CASES[job[0]][0](job[1]), jobs, 2 * len(jobs))
    for value, (name, x) in zip(found, jobs * 2, strict=True):
        torch.testing.assert_close(value, CASES[name][1](x), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_nested_transforms_in_threads_match_closed_form():
    inner = hodiff.jacobian(wave, mode="forward")
    outer = hodiff.jacobian(lambda x: inner(x).sum(0), mode="forward")
    for found, x in zip(in_threads(outer, POINTS, TIMES), POINTS * (TIMES // 5), strict=True):
        torch.testing.assert_close(found, hessian(x))


def test_backward_in_another_thread_matches():
    """A thread can differentiate a product that another thread computed."""

    def third(x):
        leaf = x.clone().requires_grad_()
        scalar = hodiff.hvp(energy, leaf, V) @ V
        (gradient,) = in_threads(lambda y: torch.autograd.grad(scalar, y)[0], [leaf], 1)
        return gradient

    for x in POINTS:
        torch.testing.assert_close(third(x), -W.mT @ (torch.cos(W @ x) * (W @ V) ** 2))
