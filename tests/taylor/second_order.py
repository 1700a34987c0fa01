"""Comparison of all second derivatives of Taylor mode with a Hessian that shares no code with jets."""

import torch

import hodiff
from hodiff.taylor import derivative_tensor, value_grad_laplacian


def assert_second_order(f, x):
    """Compare value, gradient, Laplacians and mixed partial derivatives of a number f(x) of a vector x."""
    leaf = x.clone().requires_grad_()
    with hodiff.corrected():
        value = f(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    hessian = hodiff.hessian(f, route="reverse-over-reverse")(x)
    found = {"value_grad_laplacian": value_grad_laplacian(f)(x), "dense": value_grad_laplacian(f, sparse=False)(x)}
    for name, each in found.items():
        expected = (value.detach(), gradient, hessian.trace())
        for own, right in zip(each, expected, strict=True):
            torch.testing.assert_close(own, right, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(derivative_tensor(f, 2)(x), hessian, rtol=1e-8, atol=1e-9)
    two = torch.stack([x, x.flip(0)])
    rows = hodiff.laplacian(lambda points: torch.stack([f(each) for each in points]), batched=True)(two)
    torch.testing.assert_close(rows[0], hessian.trace(), rtol=1e-8, atol=1e-9)
