"""All ways that torch offers to compute a Hessian-vector product of a function of a parameter dict."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

Parameters = dict[str, Tensor]
Function = Callable[[Parameters], Tensor]
Product = Callable[[Function, Parameters, Parameters], Parameters]


def attached(x: Parameters) -> Parameters:
    """Return leaves that require a gradient and share memory with `x`."""
    return {name: tensor.detach().requires_grad_() for name, tensor in x.items()}


def gradient(f: Function, x: Parameters) -> Parameters:
    """Compute one eager gradient, the unit of all ratios."""
    x = attached(x)
    return dict(zip(x, torch.autograd.grad(f(x), list(x.values())), strict=True))


def double_backward(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the product by backward through the gradient's graph with v as the cotangent."""
    x = attached(x)
    leaves = list(x.values())
    gradients = torch.autograd.grad(f(x), leaves, create_graph=True)
    return dict(zip(x, torch.autograd.grad(gradients, leaves, list(v.values())), strict=True))


def double_backward_of_dot(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the product as the gradient of the gradient's inner product with v."""
    x = attached(x)
    leaves = list(x.values())
    gradients = torch.autograd.grad(f(x), leaves, create_graph=True)
    inner = sum((g * t).sum() for g, t in zip(gradients, v.values(), strict=True))
    assert isinstance(inner, Tensor)  # `sum` of nothing would be the int 0
    return dict(zip(x, torch.autograd.grad(inner, leaves), strict=True))


def vjp_of_grad(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the product by reverse over reverse with torch.func."""
    return vjp(grad(f), x)[1](v)[0]


def grad_of_dot(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the product by reverse over reverse with torch.func, as the gradient of an inner product."""

    def inner(x: Parameters) -> Tensor:
        return torch.stack([(g * v[name]).sum() for name, g in grad(f)(x).items()]).sum()

    return grad(inner)(x)


def jvp_of_grad(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the product by forward over reverse."""
    return jvp(grad(f), (x,), (v,))[1]


def grad_of_jvp(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the product by reverse over forward."""
    return grad(lambda x: jvp(f, (x,), (v,))[1])(x)


def functional_hvp(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the product by `torch.autograd.functional.hvp`, which uses the double backward trick twice."""
    product = torch.autograd.functional.hvp(
        lambda *leaves: f(dict(zip(x, leaves, strict=True))), tuple(x.values()), tuple(v.values())
    )[1]
    return dict(zip(x, product, strict=True))


def functional_vhp(f: Function, x: Parameters, v: Parameters) -> Parameters:
    """Compute the transposed product, which torch computes by one double backward."""
    product = torch.autograd.functional.vhp(
        lambda *leaves: f(dict(zip(x, leaves, strict=True))), tuple(x.values()), tuple(v.values())
    )[1]
    return dict(zip(x, product, strict=True))


PRODUCTS: dict[str, Product] = {
    "autograd.grad twice, grad_outputs=v": double_backward,
    "autograd.grad twice, inner product": double_backward_of_dot,
    "func.vjp of func.grad": vjp_of_grad,
    "func.grad of <func.grad, v>": grad_of_dot,
    "func.jvp of func.grad": jvp_of_grad,
    "func.grad of func.jvp": grad_of_jvp,
    "autograd.functional.hvp": functional_hvp,
    "autograd.functional.vhp": functional_vhp,
}
