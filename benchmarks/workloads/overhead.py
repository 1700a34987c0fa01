"""Product so small that only overhead takes time, against the same product written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import relative_error


def sum_of_cubes(x: Tensor) -> Tensor:
    """Compute the sum of cubes, whose Hessian is diag(6 x)."""
    return (x**3).sum()


def gradient(x: Tensor) -> Tensor:
    """Compute one eager gradient."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(sum_of_cubes(x), x)[0]


def double_backward(x: Tensor, v: Tensor) -> Tensor:
    """Compute the product by backward through the gradient's graph with v as the cotangent."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(sum_of_cubes(x), x, create_graph=True)
    return torch.autograd.grad(g, x, v)[0]


HAND_WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autograd.grad twice, grad_outputs=v": double_backward,
    "func.jvp of func.grad": lambda x, v: jvp(grad(sum_of_cubes), (x,), (v,))[1],
    "func.vjp of func.grad": lambda x, v: vjp(grad(sum_of_cubes), x)[1](v)[0],
    "func.grad of <func.grad, v>": lambda x, v: grad(lambda x: grad(sum_of_cubes)(x) @ v)(x),
    "func.grad of func.jvp": lambda x, v: grad(lambda x: jvp(sum_of_cubes, (x,), (v,))[1])(x),
    "autograd.functional.hvp": lambda x, v: torch.autograd.functional.hvp(sum_of_cubes, x, v)[1],
    "autograd.functional.vhp": lambda x, v: torch.autograd.functional.vhp(sum_of_cubes, x, v)[1],
}


def problems(quick: bool) -> Iterator[Problem]:
    """Yield the only problem, which is always quick."""
    x, v = torch.linspace(-1, 2, 10), torch.linspace(1, 3, 10)
    product = partial(hodiff.hvp, sum_of_cubes, x, v)
    yield Problem(
        name="cubes",
        title="sum of cubes of 10 elements",
        contestants=[
            Contestant("one gradient, eager", "unit", partial(gradient, x)),
            Contestant("hodiff.hvp", "hodiff", product),
            *(Contestant(f"hodiff.hvp, {route}", "route", partial(product, route=route)) for route in hodiff.ROUTES),
            *(Contestant(f"torch {name}", "torch", partial(way, x, v)) for name, way in HAND_WRITTEN.items()),
        ],
        error=lambda found: relative_error(found, (6 * x * v).double()),
        tolerance=1e-5,
    )
